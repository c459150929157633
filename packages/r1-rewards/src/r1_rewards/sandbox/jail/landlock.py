"""Landlock: restrict this process to given files; no TCP, abstract sockets or signals to others."""

import ctypes
import os
import struct
from collections.abc import Iterable

from . import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
_RULE_PATH_BENEATH, _VERSION = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_SINCE, _TCP = 4, 0b11  # bind, connect
_SCOPES_SINCE, _SCOPES = 6, 0b11  # abstract sockets, signals


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process only the files beneath these paths; missing paths are skipped.

    Raises OSError without Landlock (before Linux 5.13, or switched off).
    """
    version = kernel.syscall(_CREATE_RULESET, None, 0, _VERSION)
    rights = _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]
    attributes = struct.pack("QQQ", rights, _TCP * (version >= _TCP_SINCE), _SCOPES * (version >= _SCOPES_SINCE))
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _TCP_SINCE else 8
    ruleset = kernel.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ & rights)
        for path in writable:
            _allow(ruleset, path, rights)
        kernel.syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        kernel.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)
