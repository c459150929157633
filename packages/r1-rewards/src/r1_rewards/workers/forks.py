"""Fork workers from a process that has loaded a user's code, and limit and reap them. Runs on the worker side.

If the import started threads, which do not survive a fork, this process is the worker itself, and the pool starts
another process for each worker. The output of user code goes to stderr.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from r1_rewards.sandbox.jail.kernel import die_with_parent
from r1_rewards.workers import frames
from r1_rewards.workers.descendants import adopt_orphans, children, kill_tree


def receive_setup(descriptor: int) -> tuple[socket.socket, Any]:
    """Return the connection to the pool, and its first message."""
    os.set_inheritable(descriptor, False)  # a child process of user code must not keep the connection open
    pool = socket.socket(fileno=descriptor)
    return pool, frames.receive(pool)


def serve(
    pool: socket.socket, described: Mapping[str, object], memory_mib: int | None, work: Callable[[socket.socket], None]
) -> None:
    """Send `described`, then run `work(connection)` in each fork that the pool asks for, until the pool is gone.

    `memory_mib` limits a worker's memory beyond what loading took.
    """
    forks = sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    frames.send(pool, {**described, "forks": forks})
    connection: socket.socket | None = pool
    if forks:
        gc.freeze()  # so that collections in the forks leave the shared pages alone
        connection = _serve_forks(pool)
    else:
        adopt_orphans()
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    if connection:
        if memory_mib is not None:
            _limit_memory(memory_mib << 20)
        work(connection)


def _serve_forks(pool: socket.socket) -> socket.socket | None:
    adopt_orphans()
    own_pid = os.getpid()
    own = set(children(own_pid))  # which user code has started when it was imported
    workers: set[int] = set()
    while True:
        try:
            word, descriptors, _, _ = socket.recv_fds(pool, 1, 1)
        except OSError:
            word = b""
        if word == b"F":
            child = os.fork()
            if child == 0:
                pool.close()
                adopt_orphans()
                os.setpgid(0, 0)  # no session: Linux shares processors out by sessions first, by priority only then
                die_with_parent(own_pid)
                return socket.socket(fileno=descriptors[0])
            os.close(descriptors[0])
            workers.add(child)
            frames.send(pool, child)
        elif word == b"R":
            child = frames.receive(pool)
            code = None
            with contextlib.suppress(ChildProcessError):  # user code ignores SIGCHLD: the kernel has reaped it
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            workers.discard(child)
            _kill_orphans(own | workers)
            frames.send(pool, code)
        else:
            for child in workers:
                kill_tree(child)
            _kill_orphans(own)
            return None


def _kill_orphans(kept: set[int]) -> None:
    while orphans := [child for child in children(os.getpid()) if child not in kept]:
        for orphan in orphans:
            kill_tree(orphan)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _limit_memory(size: int) -> None:
    """Limit what this process allocates beyond its current data; file mappings do not count."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size += int(file.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def limit_processor_time(seconds: float) -> None:
    """Have the kernel kill this process (SIGXCPU) if a sample takes far too long, even without the pool."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    for child in children(os.getpid()):
        kill_tree(child)
    os.killpg(0, signal.SIGKILL)
