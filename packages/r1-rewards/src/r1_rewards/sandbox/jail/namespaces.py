"""Namespaces: a root directory with only Python in it, no network, no other processes."""

import os
import sys
from collections.abc import Sequence

from . import kernel

WORK = "/work"  # where a judged program may write; a file system in memory, new for every run
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_APART = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_BASE = "/tmp"  # any directory that exists: the new root is mounted over it, seen by this process only


def python_paths(module_paths: Sequence[str]) -> list[str]:
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    return [*dict.fromkeys([*libraries, os.path.join(sys.base_prefix, "lib"), *sys.path, *module_paths])]


def isolate(readable: Sequence[str]) -> set[str]:
    """Move this process into namespaces and a root directory of its own, as far as allowed; return what was achieved.

    "network": no network, not even loopback. "root": only `readable` exists, read-only. "user": a user namespace counts
    the processes.
    """
    active: set[str] = set()
    try:
        kernel.unshare(_APART)
    except OSError:
        try:
            _become_root_of_own_namespace()
        except OSError:
            return active
        active.add("user")
    active.add("network")
    try:
        _build_root(readable)
    except OSError:
        return active
    active.add("root")
    return active


def _become_root_of_own_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | _APART)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _build_root(readable: Sequence[str]) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # Opened before the mount below hides what lies in _BASE.
    sources = {path: os.open(path, os.O_PATH) for path in (*readable, *DEVICES) if os.path.exists(path)}
    links = {path: os.readlink(path) for path in sources if os.path.islink(path)}
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, descriptor in sorted(sources.items()):
        target = _BASE + path
        if path in links and not links[path].startswith("/"):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(links[path], target)
        elif not os.path.lexists(target):
            _bind(descriptor, target)
        os.close(descriptor)
    os.mkdir(_BASE + WORK)
    kernel.enter_root(_BASE)
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY)


def _bind(descriptor: int, target: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "x").close()
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    if not target.startswith(_BASE + "/dev/"):
        flags |= kernel.MS_NODEV
    flags |= os.statvfs(target).f_flag & (os.ST_NOEXEC | os.ST_NODEV)
    kernel.mount("none", target, None, flags)


def mount_work(size: int) -> None:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", WORK, "tmpfs", flags, f"size={size},nr_inodes=1000,mode=777")
