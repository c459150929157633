"""Linux calls that Python does not offer, through ctypes; each raises OSError if the kernel refuses."""

import ctypes
import os
import platform
import signal

MACHINE = 1 if platform.machine() == "aarch64" else 0  # column of the tables of system call numbers
SUPPORTED = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

_PIVOT_ROOT = (155, 41)
_CAPSET = (126, 91)
_CAPABILITY_VERSION = 0x2008_0522
_LAST_CAPABILITY = 63
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return checked(_libc.syscall(ctypes.c_long(number), *words), f"system call {number}")


def prctl(option: int, first: int = 0, second: object = 0) -> int:
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in (first, second, 0, 0)]
    return checked(_libc.prctl(option, *words), f"prctl {option}")


def unshare(flags: int) -> None:
    checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    checked(result, f"mount {target}")


def enter_root(folder: str) -> None:
    os.chdir(folder)
    syscall(_PIVOT_ROOT[MACHINE], b".", b".")
    checked(_libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent's thread ends; exit now if it has ended already.

    A change of user cancels this. The first process of a pid namespace sees 0 as its parent.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):
        os._exit(1)


def adopt_orphans() -> None:
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def drop_privileges() -> None:
    """Drop all capabilities for good."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the kernel's last one, or nothing to drop
            break
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall(_CAPSET[MACHINE], ctypes.byref(header), ctypes.byref(nothing))
