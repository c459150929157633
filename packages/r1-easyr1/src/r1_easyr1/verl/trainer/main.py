"""`python3 -m verl.trainer.main WORDS`: becomes `r1 train WORDS`, as the same process."""

import os
import sys

if __name__ == "__main__":
    # A new program, so that processes which it starts find its main module without any hook.
    os.execv(sys.executable, [sys.executable, "-m", "r1_cli.main", "train", *sys.argv[1:]])
