"""How long ranks take to gather, scatter and add up what a layer of a model has."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from gpu_stages.bench import Bench, Row, run_ranks, seconds
from r1_core.learner.parallel import Parallel


def measure(bench: Bench) -> Iterator[Row]:
    bench.require(2)
    sizes = [2**12] if bench.tiny else [2**20, 2**24, 2**28]  # numbers in a whole tensor
    yield from (run_ranks(bench, world, _job, size)[0] for world in bench.worlds(2, 4, 8) for size in sizes)


def _job(parallel: Parallel, bench: Bench, size: int) -> Row:
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    share = torch.ones(size // parallel.world, dtype=dtype, device=bench.kind)
    whole = torch.ones(size, dtype=dtype, device=bench.kind)
    ways = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, share),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(share, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    row: Row = {"ranks": parallel.world, "MB": whole.nbytes / 1e6}
    for name, way in ways.items():
        taken = seconds(bench, way)
        row |= {f"{name} ms": taken * 1e3, f"{name} GB/s": whole.nbytes / taken / 1e9}
    return row
