"""Gloo ranks for tests: processes that start once and run one case after another.

A case is a function that can be imported by its name, from a module beside the tests and not from a test's own; each
rank calls it with the same arguments, the default process group joined, and what it returns comes back by pickle.
"""

import atexit
import importlib
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

# What cases and their tests change in libraries, as models that never round to float32 need it: undone after each case
# in a rank, and after each test in the tests' own process, so that no other model is computed that way.
patches = pytest.MonkeyPatch()
DEADLINE = 300.0  # seconds for a case, and for a collective in it
_SPAWN = get_context("spawn")  # a fork would share torch's threads


class Rank:
    """A process, and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, theirs = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_pool: list[Rank] = []


def run(case: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    """Let `world` ranks call the case at the same time; return what each returned, by rank.

    Raises AssertionError with what the ranks that failed have written. All are started anew after that: one may still
    wait for another that is gone.
    """
    while len(_pool) < world:
        _pool.append(Rank())
    ranks = _pool[:world]
    with tempfile.TemporaryDirectory() as folder:
        for number, rank in enumerate(ranks):
            order = (case.__module__, case.__qualname__, args, number, world, f"{folder}/rendezvous")
            try:
                rank.pipe.send(order)
            except BrokenPipeError:
                rank.process.join(5.0)
                end()  # the next case starts new ones
                raise AssertionError(f"rank {number} ended between cases: {rank.process.exitcode}") from None
        answers: dict[int, Any] = {}
        failures: list[str] = []
        waiting: dict[Any, int] = {rank.pipe: number for number, rank in enumerate(ranks)}
        while waiting:
            # The first to fail need not be the one at fault: the others are cut off by it.
            ready = wait(list(waiting), 5.0 if failures else DEADLINE)
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} still waited")
                break
            for pipe in ready:
                number = waiting.pop(pipe)
                failed, answers[number] = _receive(pipe)
                if failed:
                    failures.append(f"rank {number}:\n{answers[number]}")
    if failures:
        end()
        raise AssertionError(f"{case.__qualname__}: " + "\n".join(failures))
    return [answers[number] for number in range(world)]


def _receive(pipe: Any) -> tuple[bool, Any]:
    """Whether a rank failed, and what it returned or wrote."""
    try:
        failed, answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return True, "ended without a word"
    return failed, answer


@atexit.register
def end() -> None:
    """End all ranks; the next case starts new ones."""
    while _pool:
        _pool.pop().end()


def serve(pipe: Connection) -> None:
    """Run cases until the pipe is closed; this is a rank's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' own process ends it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        try:
            answer = (False, _call(*order))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _call(module: str, name: str, args: tuple[Any, ...], rank: int, world: int, rendezvous: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=DEADLINE),
    )
    try:
        dist.barrier()  # a case that one rank ends at once would cut off another that still connects
        return getattr(importlib.import_module(module), name)(*args)
    finally:
        patches.undo()
        dist.destroy_process_group()
        # DTensor remembers by shape of mesh what an operation gives, with the names of groups that are gone now.
        _clear_sharding_prop_cache()
