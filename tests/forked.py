"""Start `r1` in processes of its own: forks of one that has imported what a training run imports.

Importing torch, transformers and r1 takes about five processor seconds, most of what a run of few small steps takes.
The process that forks never computes, so that its forks inherit no threads and no state of another run.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PRELOADED = "r1_cli.jobs.train"
R1 = "from r1_cli.main import main\nmain()"
NUMBER = struct.Struct("i")


class Forked:
    """A process that runs a program with these words as arguments, in the repository's root.

    The methods and attributes are those of `subprocess.Popen`. Standard output and errors are one text.

    Args:
        program: Python source, as after `python -c`.
        environment: variables besides those of this process.
    """

    def __init__(self, *words: str, program: str = R1, **environment: str) -> None:
        request = {"words": words, "program": program, "environment": {**os.environ, **environment}}
        self.returncode: int | None = None
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._numbers, theirs = os.pipe()
        socket.send_fds(_connection(), [json.dumps(request).encode()], [self._output.fileno(), theirs])
        os.close(theirs)
        self.pid = self._read_number()

    def _read_number(self) -> int:
        (number,) = NUMBER.unpack(os.read(self._numbers, NUMBER.size))
        return int(number)

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._numbers], [], [], seconds)[0]:
            self.returncode = self._read_number()
            os.close(self._numbers)
        return self.returncode

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float = 600.0) -> int:
        if (code := self._wait(timeout)) is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:.0f} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and its number is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def printed(self) -> str:
        """Return what the process has printed so far."""
        file = self._output.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")  # its place to write stays

    def communicate(self, timeout: float = 600.0) -> str:
        """Wait for the end; return what the process has printed."""
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read()


@cache
def _connection() -> socket.socket:
    """Start the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import forked; exec(forked.serve({theirs.fileno()}))"
    with theirs:
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    return ours


def serve(descriptor: int) -> str:
    """Fork for each request. Return the program of a request in its fork, and an empty one when requests have ended."""
    importlib.import_module(PRELOADED)
    gc.freeze()
    requests, running = socket.socket(fileno=descriptor), dict[int, int]()
    while True:
        if select.select([requests], [], [], 0.02 if running else None)[0]:
            message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 2)
            if not message:
                return ""
            if not (pid := os.fork()):
                requests.close()
                return _become(json.loads(message), descriptors[0], [*descriptors, *running.values()])
            os.close(descriptors[0])
            running[pid] = descriptors[1]
            os.write(descriptors[1], NUMBER.pack(pid))
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                os.write(numbers := running.pop(pid), NUMBER.pack(os.waitstatus_to_exitcode(status)))
                os.close(numbers)


def _become(request: dict, output: int, inherited: list[int]) -> str:
    """Let this process be what `python -c` would have started."""
    for stream in (1, 2):
        os.dup2(output, stream)
    for descriptor in inherited:
        os.close(descriptor)
    sys.path.remove(str(TESTS))
    os.chdir(TESTS.parent)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["words"]]
    return str(request["program"])
