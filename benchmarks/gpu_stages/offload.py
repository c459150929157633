"""What keeping weights and optimizer with the processor, always or while others compute, saves and what it costs."""

import time
from collections.abc import Callable, Iterator

import torch

from gpu_stages.bench import Bench, Row, gigabytes, run_ranks, seconds, wait
from gpu_stages.models import build_learner, build_model, make_samples
from r1_core.learner import Learner
from r1_core.learner.offload import Offload, bytes_on_device, states_of, tensors_of
from r1_core.learner.parallel import Parallel, Shard
from r1_core.objective import Objective


def measure(bench: Bench) -> Iterator[Row]:
    name = "tiny" if bench.tiny else "1.5B"
    forms = "none", "always", "between phases"
    yield from (run_ranks(bench, world, _job, name, form)[0] for world in bench.worlds(1, 2, 8) for form in forms)


def _job(parallel: Parallel, bench: Bench, name: str, form: str) -> Row:
    always = form == "always"
    shard = Shard(offload=always) if bench.tiny else Shard(torch.bfloat16, torch.float32, offload=always)
    model = build_model(name, bench, parallel, shard)
    length, count = (64, 8) if bench.tiny else (2048, 32)
    between = Offload(weights=True, optimizer=True) if form == "between phases" else Offload()
    learner = build_learner(model, bench, parallel, 4 * length, between)
    samples = learner.add_logprobs(make_samples(name, count, length, bench), ["old_logprobs"])

    def step() -> None:
        learner.forward_backward(samples, Objective())
        learner.optim_step()

    taken = seconds(bench, step, runs=3)
    row: Row = {"model": name, "ranks": parallel.world, "offload": form, "step s": taken, "peak GB": gigabytes(bench)}
    row["held GB after a step"] = _held(bench, learner)
    row["leaving s"] = _timed(bench, learner.offload)
    row["held GB while others compute"] = _held(bench, learner)
    # The weights are fetched for the log-probs, and the optimizer's states for the next step of it.
    row["fetching weights s"] = _timed(bench, lambda: learner._offloads.load(learner.model))
    row["fetching states s"] = _timed(bench, lambda: learner._offloads.load(learner.optimizer))
    return row


def _timed(bench: Bench, action: Callable[[], object]) -> float:
    wait(bench)
    start = time.perf_counter()
    action()
    wait(bench)
    return time.perf_counter() - start


def _held(bench: Bench, learner: Learner) -> float:
    """What the device has of weights and states: by the allocator's count, on processors by the storages' own bytes."""
    if bench.kind == "cuda":
        return torch.cuda.memory_allocated() / 1e9
    return (bytes_on_device(tensors_of(learner.model)) + bytes_on_device(states_of(learner.optimizer))) / 1e9
