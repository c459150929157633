"""Find, watch and kill all descendants of a process, through /proc."""

import contextlib
import ctypes
import os
import signal

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def computes(pid: int) -> bool:
    """Whether a thread of a process or of its descendants runs or waits for a processor; True where none can tell."""
    found, position = [pid], 0
    while position < len(found):
        one = found[position]
        try:
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "R":
                        return True
        except OSError:
            if position == 0:
                return True
        found += children(one)
        position += 1
    return False


def kill_tree(pid: int) -> None:
    """Kill a process, its process group and all its descendants, in any session.

    Each process is stopped before its children are listed, so that none escapes by forking.
    """
    found, position = [pid], 0
    while position < len(found):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(found[position], signal.SIGSTOP)
        found += children(found[position])
        position += 1
    for one in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(one, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
