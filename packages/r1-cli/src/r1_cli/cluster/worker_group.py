"""Remote processes as the driver calls them, whatever started them: their interface, errors and output."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias


class ClusterError(RuntimeError):
    """Part of the run is gone, or does not answer; the message names it, its machine and its log."""


class Reference(Protocol):
    """A value that was put down once for all ranks. It pickles, without the value."""

    def load(self) -> Any:
        """Return the value where this is a rank; its arrays may be read-only and shared with other ranks."""


Put: TypeAlias = Callable[[Any], Reference]


class WorkerGroup(Protocol):
    """Processes that hold a `Rank` each, wherever they are.

    What a verb raises in one of them is raised here as what it was, with a note of where; the ranks are of no use then.
    """

    def call(self, verb: str, *args: Any, label: str = "") -> Any:
        """Call a method of every rank with the same arguments; return rank 0's result. Messages call it `label`."""

    def call_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        """Do as `call`, and return what every rank answers, in their order."""

    def put(self, value: Any) -> Reference:
        """Put a value down where every rank can read it, and the arrays in it without a copy."""

    @property
    def remote_put(self) -> Put:
        """What puts a value down where it is called, in a rank, say: it pickles."""

    @property
    def remote_caller(self) -> Callable[..., Any]:
        """What asks the first of them from another of the cluster's processes: it pickles."""

    def close(self) -> None:
        """Let all ranks end."""


def redirect_output(log: Path) -> None:
    """Let what this process prints from now on, and what its libraries print, go to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def picklable_error(error: BaseException) -> BaseException:
    """Return an error that is the same after pickling: itself, or a RuntimeError that tells of it."""
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
