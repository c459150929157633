"""What a stage measures on: this machine's devices, ranks on them, and a clock that waits for the device."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from r1_core.learner.parallel import Parallel

Row = dict[str, Any]  # a column's name, its unit in it, and the value
Job = Callable[..., Row | None]  # of one rank: job(parallel, bench, *arguments)


class Skipped(Exception):
    """What a stage needs and this machine has not."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The devices of this machine, or processors in their place, on which everything is tiny."""

    kind: str  # "cuda" or "cpu"
    devices: int
    device_name: str

    @classmethod
    def on_this_machine(cls, cpu: bool) -> "Bench":
        if cpu:
            return cls("cpu", 2, "processor")
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU here; --cpu goes the same ways on processors")
        return cls("cuda", torch.cuda.device_count(), torch.cuda.get_device_name(0))

    @property
    def tiny(self) -> bool:
        return self.kind == "cpu"

    def worlds(self, *wanted: int) -> list[int]:
        """Those numbers of ranks for which there are devices."""
        return [world for world in wanted if world <= self.devices]

    def require(self, devices: int) -> None:
        """Raise Skipped if there are fewer devices."""
        if self.devices < devices:
            raise Skipped(f"it needs {devices} devices, here is {self.devices}")


def seconds(bench: Bench, action: Callable[[], object], runs: int = 5) -> float:
    """Return the median time of an action, once the device has done it."""
    times = []
    for _ in range(runs + 1):
        wait(bench)
        start = time.perf_counter()
        action()
        wait(bench)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[runs // 2]  # the first is warm-up


def wait(bench: Bench) -> None:
    if bench.kind == "cuda":
        torch.cuda.synchronize()


def gigabytes(bench: Bench) -> float | None:
    """Return what tensors have taken of this rank's device since the last call at most; None on processors."""
    if bench.kind != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def run_ranks(bench: Bench, world: int, job: Job, *arguments: Any) -> list[Row]:
    """Run `job(parallel, bench, *arguments)` in so many processes, a device each; return what they return.

    Raises torch.multiprocessing.ProcessRaisedException or ProcessExitedException as soon as one of them fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (Path(folder), world, bench, job, arguments), nprocs=world)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def _rank(rank: int, folder: Path, world: int, bench: Bench, job: Job, arguments: tuple[Any, ...]) -> None:
    timeout = timedelta(minutes=5)
    if bench.kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    store = dist.FileStore(str(folder / "store"), world)
    backend = "cpu:gloo,cuda:nccl" if bench.kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        found = job(Parallel.join(bench.kind), bench, *arguments)
        (folder / f"{rank}.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
