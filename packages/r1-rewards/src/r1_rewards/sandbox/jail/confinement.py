"""Confine the process that becomes the judged program, before it runs any judged code."""

import contextlib
import os
import resource
import socket
from collections.abc import Sequence

from . import kernel, landlock, namespaces, seccomp, values

_FIRST_UID = 0x7000_0000  # of the users that root turns judged programs into: one per run, far from real ones
_MEBIBYTE = 1 << 20


def confine(limits: values.RunLimits, isolation: set[str], readable: Sequence[str], launcher: int) -> list[str]:
    """Confine this process for good and return the active protections (see PROTECTIONS in `execution`).

    A protection counts only if the kernel has accepted all of it. `launcher` is the parent's pid in the outer
    namespace.
    """
    _limit(limits, 0 if "user" in isolation or os.getuid() == 0 else _threads_of(os.getuid()))
    counted = _become_nobody(launcher, limits["module_paths"]) or os.getuid() != 0
    kernel.die_with_parent(launcher)
    kernel.set_dumpable(False)
    kernel.drop_privileges()
    active = {"limits", "privileges"}
    if "root" in isolation:
        active.add("files")
    try:
        landlock.restrict(readable, ["/dev/null", *([namespaces.WORK] if "root" in isolation else [])])
        active.add("files")
    except OSError:
        pass
    try:
        seccomp.install(threads=counted)
        if _no_sockets():
            active.update(("network", "processes"))
    except OSError:
        pass
    return sorted(active)


def _limit(limits: values.RunLimits, neighbours: int) -> None:
    seconds = int(limits["cpu_seconds"]) + 1
    bounds = {
        resource.RLIMIT_AS: limits["memory_mib"] * _MEBIBYTE,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: limits["files_mib"] * _MEBIBYTE,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: limits["threads"] + neighbours,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(kind, (bound, bound))


def _threads_of(uid: int) -> int:
    threads = 0
    for process in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}").st_uid == uid:
                threads += len(os.listdir(f"/proc/{process}/task"))
    return threads


def _become_nobody(launcher: int, module_paths: Sequence[str]) -> bool:
    """As root, become an otherwise unused user, so that the kernel counts this run's threads alone.

    Returns False if that user could not read the standard library, as with a Python in a home directory.
    """
    if os.getuid() != 0:
        return False
    nobody = _FIRST_UID + launcher
    try:
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, 0)
    except OSError:
        return False
    if not os.access(os.__file__, os.R_OK, effective_ids=True):
        os.setresuid(0, 0, 0)
        return False
    os.setresuid(nobody, nobody, nobody)
    for path in module_paths:
        if not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(f"root's judged programs run as another user, who cannot read {path}: chmod o+rX it")
    return True


def _no_sockets() -> bool:
    """Whether the filter works; some kernels accept one without applying it."""
    try:
        socket.socket().close()
    except OSError:
        return True
    return False
