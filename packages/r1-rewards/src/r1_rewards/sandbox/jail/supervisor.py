"""The supervisor runs judged programs one after another, each in its own process and pid namespace.

    owner (execution.py) ── socket ── supervisor ── launcher ── judged program

The launcher makes a pid namespace and an empty working directory and forks the program as that namespace's first
process: when it ends, the kernel kills all it started. The program reports its active protections over the socket and
closes it before it runs judged code.
"""

import builtins
import contextlib
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

from . import confinement, kernel, namespaces, values
from .assertions import run_assertions
from .decoys import run_decoys
from .solution import run_program, serve_solution

_MODES: dict[str, Callable[[values.Request], None]] = {
    "program": run_program,
    "solution": serve_solution,
    "assertions": run_assertions,
    "decoys": run_decoys,
}
_FIRST_PASSED = 3  # judged processes find stdin, stdout, stderr and then the request's further pipes here
_SAFE = 100  # the owner's socket; descriptors above this do not collide with those


def main(descriptor: int, parent: int) -> None:
    kernel.die_with_parent(parent)
    kernel.adopt_orphans()
    if descriptor != _SAFE:  # which the kernel would refuse to copy to itself
        os.dup2(descriptor, _SAFE, inheritable=False)
        os.close(descriptor)
    owner = socket.socket(fileno=_SAFE)
    setup = values.receive(owner)
    os.environ.clear()
    sys.path += setup["module_paths"]
    readable = namespaces.python_paths(setup["module_paths"])
    active = namespaces.isolate(readable) if kernel.SUPPORTED else set()
    gc.freeze()  # so that the end of each forked interpreter does not visit what it never touched
    while True:
        word, descriptors, _, _ = socket.recv_fds(owner, 1, 8)
        if not word:
            return
        if not descriptors:  # an order to kill what had just ended by itself
            continue
        request = values.receive(owner)
        if run := _keep(owner, request, descriptors, active, readable):
            run()
            return


def _keep(
    owner: socket.socket, request: values.Request, descriptors: list[int], active: set[str], readable: list[str]
) -> Callable[[], None] | None:
    watch, held = os.pipe()
    status_read, status_write = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.close(watch)
        os.close(status_read)
        launcher = os.getpid()
        child = _start(request["limits"], active)
        if child == 0:
            return _become(owner, request, launcher, descriptors, active, readable)
        owner.close()
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        os.write(status_write, b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    for descriptor in (held, status_write, *descriptors):
        os.close(descriptor)
    killed = _wait(owner, watch, launcher)
    _reap(launcher)
    status_text = os.read(status_read, 16)
    os.close(watch)
    os.close(status_read)
    values.send(owner, {"killed": killed, "code": int(status_text) if status_text else None})
    return None


def _start(limits: values.RunLimits, active: set[str]) -> int:
    kernel.die_with_parent(os.getppid())
    os.setsid()
    if "root" in active:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        namespaces.mount_work(limits["files_mib"] << 20)
    return os.fork()


def _become(
    owner: socket.socket,
    request: values.Request,
    launcher: int,
    descriptors: list[int],
    active: set[str],
    readable: list[str],
) -> Callable[[], None]:
    high = [os.dup2(descriptor, _SAFE + 1 + index) for index, descriptor in enumerate(descriptors)]
    for index, descriptor in enumerate(high):
        os.dup2(descriptor, index)
    os.closerange(len(high), _SAFE)
    os.closerange(_SAFE + 1, _SAFE + 1 + len(high))
    os.umask(0o077)
    with owner as last_word:
        try:
            if "root" in active:
                os.chdir(namespaces.WORK)
            holding = confinement.confine(request["limits"], active, [*readable, *namespaces.DEVICES], launcher)
        except OSError as error:
            values.send(last_word, {"failed": str(error)})
            os._exit(1)
        values.send(last_word, {"active": holding})
    if not set(request["required"]) <= set(holding):
        os._exit(1)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` would have defined
    return lambda: _MODES[request["mode"]](request)


def _wait(owner: socket.socket, watch: int, launcher: int) -> bool:
    killed = False
    while True:
        ready, _, _ = select.select([watch] if killed else [watch, owner], [], [])
        if watch in ready:
            return killed
        killed = True
        if not owner.recv(1):
            os._exit(0)  # the owner is gone, and the children die with this process
        os.killpg(launcher, signal.SIGKILL)


def _reap(launcher: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
