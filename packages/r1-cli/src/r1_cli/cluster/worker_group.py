"""Remote processes as the driver calls them: their interface, errors and output, whatever starts them."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias


class ClusterError(RuntimeError):
    """A process of the run has died or does not answer; the message names it, its node and its log."""


class Reference(Protocol):
    """A value that is stored once for all processes of a node. It pickles without the value."""

    def load(self) -> Any:
        """Return the value in a worker; its arrays may be read-only and shared with other workers."""


Put: TypeAlias = Callable[[object], Reference]


class WorkerGroup(Protocol):
    """Processes that hold an object each, called together.

    What a method raises in one of them is raised here, with a note that names the process; the group has ended then.
    """

    def call(self, verb: str, *args: object, label: str = "") -> Any:
        """Call a method of every object with the same arguments; return the first result. Messages name it `label`."""

    def call_all(self, verb: str, *args: object, label: str = "") -> list[Any]:
        """Call as `call` does; return all results in order."""

    def put(self, value: object) -> Reference:
        """Store a value where every worker can read it, arrays without a copy."""

    @property
    def remote_put(self) -> Put:
        """A function that a worker can call to store a value; it pickles."""

    @property
    def remote_caller(self) -> Callable[..., Any]:
        """A function by which other workers call the first one; it pickles."""

    def close(self) -> None:
        """End all processes."""


def redirect_output(log: Path) -> None:
    """Append the output of this process and its libraries to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def picklable_error(error: BaseException) -> BaseException:
    """Return the error, or a RuntimeError with its text if it does not survive pickling."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception as fault:
        return RuntimeError(f"{type(error).__name__}: {error} (which cannot be pickled: {fault})")
    if type(again) is type(error) and str(again) == str(error) and isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def tail_log(log: Path, count: int = 5) -> str:
    """Return the end of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        lines = [f"(it cannot be read here: {error})"]
    return "\n".join(f"    {line}" for line in lines)
