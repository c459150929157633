"""Run untrusted Python in one process, confined by the kernel; the README lists the protections.

Nothing relies on what Python code can or cannot do. Wall-clock time and output are limited from outside.
"""

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from r1_rewards.sandbox.jail import values
from r1_rewards.sandbox.pipes import Ending, Exchange, JsonChannel

PROTECTIONS = {
    "network": "no sockets",
    "processes": "one process: no fork, exec, signals or tracing",
    "files": "reads Python's libraries only; writes a small file system in memory, or nothing",
    "limits": "address space, processor time, file size, open files, threads",
    "privileges": "no capabilities, and none to gain",
}
_END_SECONDS = 1.0  # for a process whose pipes are closed to be gone
_START_SECONDS = 120.0  # for the supervisor to answer, which takes milliseconds where it gets a processor
# Exit codes of a process that was killed from outside, as by the kernel's out-of-memory killer; None: its launcher was.
_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, None)
_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); from jail.supervisor import main; sys.path.pop(); "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)

logger = logging.getLogger("r1_rewards")


class SandboxError(RuntimeError):
    """A protection is missing, or the sandbox failed; nothing was judged.

    `killed_from_outside`: a process of the sandbox was killed, so a retry may succeed.
    """

    def __init__(self, message: str, *, killed_from_outside: bool = False) -> None:
        super().__init__(message)
        self.killed_from_outside = killed_from_outside


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    memory_mib: int = 1024  # address space
    cpu_seconds: float = 30.0
    files_mib: int = 16  # of its working directory
    threads: int = 32
    output_mib: int = 4  # written to stdout, or in results of calls; of stderr only the end is kept


@dataclass(frozen=True, slots=True)
class Execution:
    """A program's output and `code`: its exit status, or minus the signal that ended it."""

    ending: Ending
    code: int | None
    stdout: bytes
    stderr: bytes  # its end


class Sandbox:
    """Runs programs one after another, each in its own process; use it in a `with` block and from one thread.

    If a protection is missing, nothing runs: a program that can open files can read the caller's memory. Programs may
    import the standard library and modules in the folders `module_paths`.
    """

    def __init__(self, limits: SandboxLimits | None = None, module_paths: Sequence[str] = ()) -> None:
        """Start the supervisor. Raises SandboxError if it does not start, or on another system than Linux."""
        if sys.platform != "linux":
            raise SandboxError(f"judged code can be confined on Linux only, this is {sys.platform}")
        self.limits = limits or SandboxLimits()
        self.killed_from_outside = False  # whether a process was ended by SIGKILL or SIGTERM, and not by `end`
        self.module_paths = tuple(str(Path(path).resolve()) for path in module_paths)
        ours, theirs = socket.socketpair()
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", _BOOTSTRAP, str(Path(__file__).parent),
                 str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env={"PYTHONHASHSEED": "0"}, cwd="/", start_new_session=True,
            )  # fmt: skip
        self._connection = ours
        ours.settimeout(_START_SECONDS)
        with self._failing_closed():
            values.send(ours, {"module_paths": self.module_paths})

    def run(self, source: str, stdin: bytes, seconds: float) -> Execution:
        """Run `source` as a script for at most `seconds`. Raises SandboxError."""
        their_stdin, writer = os.pipe()
        reader, their_stdout = os.pipe()
        errors, their_stderr = os.pipe()
        with _closing(writer, reader, errors) as ours:
            with _closing(their_stdin, their_stdout, their_stderr) as theirs:
                self._begin("program", source, theirs)
            bound = self.limits.output_mib << 20
            exchange = Exchange(ours, self._connection, stdin, bound)
            ending = exchange.run(time.monotonic() + seconds)
            code = self.end(kill=ending != "ended")
            if ending == "ended":
                ending = "killed" if code is None else exchange.drain()
            return Execution(ending, code, bytes(exchange.stdout), bytes(exchange.stderr))

    def start(
        self, mode: Literal["solution", "assertions", "decoys"], source: str, units: Sequence[str] = ()
    ) -> JsonChannel:
        """Start a process that exchanges lines; `end` it before the next. Raises SandboxError."""
        nothing = os.open(os.devnull, os.O_RDWR)
        their_requests, writer = os.pipe()
        reader, their_responses = os.pipe()
        with _closing(nothing, their_requests, their_responses):
            try:
                self._begin(mode, source, [nothing, nothing, nothing, their_requests, their_responses], units)
            except BaseException:
                os.close(writer)
                os.close(reader)
                raise
        return JsonChannel(writer, reader, self.limits.output_mib << 20)

    def end(self, kill: bool = True, *, ended: bool = False) -> int | None:
        """Kill the running process and all it started, and return its exit code.

        A process that seems to have `ended` gets _END_SECONDS to exit by itself.
        """
        with self._failing_closed():
            if kill and not (ended and select.select([self._connection], [], [], _END_SECONDS)[0]):
                self._connection.sendall(b"K")
            report = values.receive(self._connection)
        self._notice_kill(report)
        code: int | None = report["code"]
        return code

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, mode: str, source: str, descriptors: Sequence[int], units: Sequence[str] = ()) -> None:
        request = {
            "mode": mode,
            "source": source,
            "units": list(units),
            "limits": asdict(self.limits) | {"module_paths": self.module_paths},
            "required": list(PROTECTIONS),
        }
        with self._failing_closed():
            socket.send_fds(self._connection, [b"R"], list(descriptors))
            values.send(self._connection, request)
            report = values.receive(self._connection)
        if "active" not in report:
            self._notice_kill(report)
            message = f"the sandbox could not be set up: {report.get('failed', 'its process ended')}"
            raise SandboxError(message, killed_from_outside=self.killed_from_outside)
        self.active: tuple[str, ...] = tuple(report["active"])
        missing = [name for name in PROTECTIONS if name not in self.active]
        if missing:
            raise SandboxError(
                f"this system does not offer {', '.join(f'{name!r} ({PROTECTIONS[name]})' for name in missing)}; "
                "nothing was run. Judged code needs seccomp, and Landlock (Linux 5.13) or namespaces: ask whoever runs "
                "this system for them, or serve the reward from one that has them (r1-rewards serve code)"
            )
        _announce(self.active)

    def _notice_kill(self, report: Mapping[str, object]) -> None:
        if "code" in report and not report["killed"] and report["code"] in _OUTSIDE:
            self.killed_from_outside = True

    @contextlib.contextmanager
    def _failing_closed(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError) as error:
            killed = self._connection.fileno() >= 0 and self._supervisor_was_killed()
            self.close()
            message = f"the sandbox's supervisor does not answer: {error}"
            raise SandboxError(message, killed_from_outside=killed) from error

    def _supervisor_was_killed(self) -> bool:
        try:
            return self._supervisor.wait(_END_SECONDS) in _OUTSIDE
        except subprocess.TimeoutExpired:
            return False


def describe() -> tuple[str, ...]:
    """Try all protections and return the active ones. Raises SandboxError if one is missing."""
    with Sandbox() as sandbox:
        sandbox.run("", b"", _START_SECONDS)
        return sandbox.active


@functools.cache
def _announce(active: tuple[str, ...]) -> None:
    logger.info("sandbox active: %s", ", ".join(active))


@contextlib.contextmanager
def _closing(*descriptors: int) -> Iterator[tuple[int, ...]]:
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
