"""What keeping weights, gradients and optimizer with the processor saves on a device, and what it costs."""

import torch

from gpu_stages.bench import Bench, Row, gigabytes, run_ranks, seconds
from gpu_stages.models import build_learner, build_model, make_samples
from r1_core.learner.parallel import Parallel, Shard
from r1_core.objective import Objective


def measure(bench: Bench) -> list[Row]:
    name = "tiny" if bench.tiny else "1.5B"
    return [
        run_ranks(bench, world, _job, name, offload)[0] for world in bench.worlds(1, 2, 8) for offload in (False, True)
    ]


def _job(parallel: Parallel, bench: Bench, name: str, offload: bool) -> Row:
    shard = Shard(offload=offload) if bench.tiny else Shard(torch.bfloat16, torch.float32, offload=offload)
    model = build_model(name, bench, parallel, shard)
    length, count = (64, 8) if bench.tiny else (2048, 32)
    learner = build_learner(model, bench, parallel, 4 * length)
    samples = learner.annotate(make_samples(name, count, length, bench), ["old_logprobs"])

    def step() -> None:
        learner.forward_backward(samples, Objective())
        learner.optim_step()

    taken = seconds(bench, step, runs=3)
    return {
        "model": name,
        "ranks": parallel.world,
        "offload": str(offload),
        "step s": taken,
        "peak GB": gigabytes(bench),
    }
