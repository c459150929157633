"""Processes of this machine, read from /proc: children, states, and killing all that a process has started."""

import os
import signal
from contextlib import suppress
from pathlib import Path


# Not by r1_rewards.workers.descendants, which finds the same: `import r1_rewards` would add 65 ms to `r1 --help`.
def children_of(pid: int) -> list[int]:
    """Return the processes that `pid` has started, by any of its threads; [] if it has ended."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants_of(child)]
    return found


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as /proc/PID/stat has it: T is stopped, Z a zombie; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def title_of(pid: int) -> str:
    """Return the first words of a process's command line, or its short name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        told = b" ".join(words).decode(errors="replace").strip()
        return told[:100] or Path(f"/proc/{pid}/comm").read_text().strip()
    return "a process that has ended"


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
