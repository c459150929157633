"""Weights on disk end with the process that wrote them, also where it was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from r1_rollout.vllm.private_folder import PrivateFolder

HOLD = """
import sys, time
from pathlib import Path
from r1_rollout.vllm.private_folder import PrivateFolder
folder = PrivateFolder("r1-weights-", Path(sys.argv[1]))
(folder.path / "0.safetensors").write_bytes(b"weights")
print(folder.path, flush=True)
time.sleep(60)
"""


def hold(place: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    os.utime(folder, (0, 0))  # made long ago
    return process, folder


def test_what_a_killed_process_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path: Path) -> None:
    (dead, left), (alive, used) = hold(tmp_path), hold(tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    other = tmp_path / "r1-weights-of-somebody"  # without a lock, so not known to be anybody's
    other.mkdir()
    os.utime(other, (0, 0))
    try:
        with PrivateFolder("r1-weights-", tmp_path) as own:
            assert not left.exists()
            assert (used / "0.safetensors").is_file()
            assert other.is_dir()
            assert own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
    finally:
        alive.kill()
        alive.wait()
