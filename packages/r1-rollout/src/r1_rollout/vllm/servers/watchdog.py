"""Runs a command as long as its starter lives: `python -m r1_rollout.vllm.servers.watchdog COMMAND …`.

When standard input closes, the command gets SIGTERM and, GRACE seconds later, its process group SIGKILL. Linux sends
the parent-death signal when the starting *thread* ends, so it only covers a kill of this process.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1


def keep(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            child.terminate()
            break
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return child.poll() or 0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    status = keep(sys.argv[1:])
    print(f"the server has ended with status {status}", flush=True)
    os.killpg(0, signal.SIGKILL)  # helpers that the command left behind, and this process
