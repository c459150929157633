"""Wait for other processes in tests, however slow the machine is.

A test that starts another process, thread or server knows neither when that begins nor how long it is kept from a
processor: seconds, where others compute.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")
LONG = 300.0  # seconds for what takes a moment where nothing else runs


def eventually(condition: Callable[[], object], seconds: float = LONG) -> bool:
    """Whether a condition comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


def growing(attempt: Callable[[float], Value], good: Callable[[Value], object], limits: Iterable[float]) -> Value:
    """What `attempt` gives under the first of some limits in seconds under which it is good; else under the last.

    For what has to be cut off at a limit beside something that must not be.
    """
    for limit in limits:
        if good(found := attempt(limit)):
            break
    return found


def ended(pid: int | str) -> bool:
    """Whether a process is gone, or a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
