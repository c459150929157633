"""How long a checkpoint takes to write and to read, by the number of ranks that share the work."""

import tempfile
from pathlib import Path

import torch

from gpu_stages.bench import Bench, Row, run_ranks, seconds
from gpu_stages.models import build_learner, build_model, make_samples
from r1_core.learner.parallel import Parallel, Shard
from r1_core.objective import Objective


def measure(bench: Bench) -> list[Row]:
    rows = []
    for name, ranks in {"tiny": (1, 2)}.items() if bench.tiny else {"1.5B": (1, 2, 8), "7B": (2, 8)}.items():
        for world in bench.worlds(*ranks):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_ranks(bench, world, _job, name, folder)[0])
    return rows


def _job(parallel: Parallel, bench: Bench, name: str, folder: str) -> Row:
    shard = Shard() if bench.tiny else Shard(torch.bfloat16, torch.float32)
    learner = build_learner(build_model(name, bench, parallel, shard), bench, parallel, 4096)
    length = 64 if bench.tiny else 512
    samples = make_samples(name, 8, length, bench)
    learner.forward_backward(learner.add_logprobs(samples, ["old_logprobs"]), Objective())
    learner.optim_step()  # the optimizer has its moments now
    saving = seconds(bench, lambda: learner.save(Path(folder)), runs=1)
    loading = seconds(bench, lambda: learner.load(Path(folder)), runs=1)
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {"model": name, "ranks": parallel.world, "GB": size / 1e9, "save s": saving, "load s": loading}
