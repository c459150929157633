"""A training step (old log-probs, gradient, optimizer) on 1 to 8 ranks: speed, memory by phase, and equal numbers."""

import time
from itertools import pairwise

import torch

from gpu_stages.bench import Bench, Row, gigabytes, run_ranks, wait
from gpu_stages.models import build_learner, build_model, make_samples
from r1_cli.hardware import peak_flops
from r1_core.learner.parallel import Parallel, Shard
from r1_core.objective import Objective

# Bytes a weight takes while it is trained: float32 weight, gradient, two moments; and bf16 while it computes.
BYTES, ROOM = 16.0, 0.75


def measure(bench: Bench) -> list[Row]:
    names = ["tiny-VL"] if bench.tiny else ["1.5B", "7B", "7B-VL", "32B"]
    rows = []
    for name in names:
        first: Row | None = None
        for world in bench.worlds(1, 2, 4, 8):
            if not bench.tiny and not _fits(name, world):
                rows.append({"model": name, "ranks": world, "said": "its weights and moments do not fit"})
                continue
            row = run_ranks(bench, world, _job, name)[0]
            first = first or row
            row["loss to the first"] = abs(row["loss"] - first["loss"])
            row["norm to the first"] = row["gradient norm"] / first["gradient norm"] - 1
            rows.append(row)
    return rows


def _fits(name: str, world: int) -> bool:
    memory = torch.cuda.get_device_properties(0).total_memory
    return float(name.split("B")[0]) * 1e9 * BYTES / world < ROOM * memory


def _job(parallel: Parallel, bench: Bench, name: str) -> Row:
    shard = Shard() if bench.tiny else Shard(torch.bfloat16, torch.float32)
    model = build_model(name, bench, parallel, shard)
    budget, length, count = (128, 64, 8) if bench.tiny else (16384, 2048, 64)
    learner = build_learner(model, bench, parallel, budget)
    samples = make_samples(name, count, length, bench)
    row: Row = {"model": name, "ranks": parallel.world, "loaded GB": gigabytes(bench)}
    for turn in range(2):  # the second is measured: the first makes moments and finds kernels
        times = [_now(bench)]
        known = learner.add_logprobs(samples, ["old_logprobs"])
        times.append(_now(bench))
        row["old log-probs GB"] = gigabytes(bench)
        metrics = learner.forward_backward(known, Objective())
        times.append(_now(bench))
        row["gradient GB"] = gigabytes(bench)
        stepped = learner.optim_step()
        times.append(_now(bench))
        row["optimizer GB"] = gigabytes(bench)
        if turn == 0:
            row |= {"loss": metrics["pg_loss"], "gradient norm": stepped["grad_norm"]}
    forward, gradient, update = (end - start for start, end in pairwise(times))
    rate = count * length / (forward + gradient + update)
    peak = peak_flops(bench.device_name)
    flops = learner.describe().flops_per_token * count * length
    row |= {"tokens/s": rate, "old log-probs s": forward, "gradient s": gradient, "optimizer s": update}
    return row | {"gradient MFU": flops / gradient / peak / parallel.world if peak else None}


def _now(bench: Bench) -> float:
    wait(bench)
    return time.perf_counter()
