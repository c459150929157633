"""The worker side: `python -m r1_rewards.workers.worker SOCKET` loads one reward, then forks workers on request.

If the import started threads, which do not survive a fork, this process scores itself, and the pool starts another
process for each worker. The reward's output goes to stderr.
"""

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from r1_rewards.spec import RewardSpec
from r1_rewards.types import Failure, RewardSpecError
from r1_rewards.workers import frames
from r1_rewards.workers.descendants import adopt_orphans, children, kill_tree
from r1_rewards.workers.frames import Job
from r1_rewards.workers.functions import RewardFunction, load_function, score_samples

_PR_SET_PDEATHSIG = 1


def main(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)  # a child process of the reward must not keep the connection open
    pool = socket.socket(fileno=descriptor)
    setup = frames.receive(pool)
    spec = RewardSpec(setup["function"], Path(setup["path"]) if setup["path"] else None)
    try:
        function = load_function(spec, setup["kwargs"])
    except RewardSpecError as error:
        frames.send(pool, {"error": str(error)})
        return
    forks = sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1
    described = {"name": function.name, "batch": function.batch, "shape": function.shape, "wants": function.wants}
    frames.send(pool, {**described, "forks": forks})
    if not forks:
        adopt_orphans()
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        score(pool, function, setup["memory_mib"])
        return
    gc.freeze()  # so that collections in the forks leave the shared pages alone
    if connection := _serve_forks(pool):
        score(connection, function, setup["memory_mib"])


def _serve_forks(pool: socket.socket) -> socket.socket | None:
    adopt_orphans()
    own = set(children(os.getpid()))  # which the reward has started when it was imported
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
                _die_with_parent()
                return socket.socket(fileno=descriptors[0])
            os.close(descriptors[0])
            workers.add(child)
            frames.send(pool, child)
        elif word == b"R":
            child = frames.receive(pool)
            code = None
            with contextlib.suppress(ChildProcessError):  # the reward ignores SIGCHLD: the kernel has reaped it
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


def score(pool: socket.socket, function: RewardFunction, memory_mib: int | None) -> None:
    """Score jobs: {"samples": […], "whole": whether in one call, "cpu_seconds": for each sample}.

    Sends one message per sample, or one for a whole call.
    """
    if memory_mib is not None:
        _limit_memory(memory_mib << 20)
    worker = os.getpid()
    while True:
        try:
            job = frames.receive(pool)
            for message in _outcomes(job, function):
                if os.getpid() != worker:  # the reward forked, and came back twice
                    os._exit(0)
                frames.send(pool, message)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _outcomes(job: Job, function: RewardFunction) -> Iterator[object]:
    samples = job["samples"]
    if job["whole"]:
        found = score_samples(function, samples)
        yield frames.pack(found) if isinstance(found, Failure) else [frames.pack(outcome) for outcome in found]
        return
    for sample in samples:
        _limit_processor_time(job["cpu_seconds"])
        found = score_samples(function, [sample])
        yield frames.pack(found if isinstance(found, Failure) else found[0])


def _limit_memory(size: int) -> None:
    """Limit what this process allocates beyond its current data; file mappings do not count."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size += int(file.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _limit_processor_time(seconds: float) -> None:
    """Have the kernel kill this process (SIGXCPU) if a sample takes far too long, even without the pool."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    for child in children(os.getpid()):
        kill_tree(child)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
