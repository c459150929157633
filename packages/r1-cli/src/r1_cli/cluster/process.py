"""What a process of a run does with its output and its errors, whatever started it."""

import os
import pickle
import sys
from pathlib import Path


def write_into(log: Path) -> None:
    """Let what this process prints from now on, and what its libraries print, go to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)


def portable(error: BaseException) -> BaseException:
    """Return an error that is the same after pickling: itself, or a RuntimeError that tells of it."""
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception as fault:
        return RuntimeError(f"{type(error).__name__}: {error} (which cannot be pickled: {fault})")
    if type(again) is type(error) and str(again) == str(error) and isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def last_lines(log: Path, count: int = 5) -> str:
    """Return the end of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-count:]
    except OSError as error:
        lines = [f"(it cannot be read here: {error})"]
    return "\n".join(f"    {line}" for line in lines)
