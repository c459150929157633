"""What Ray costs two ranks: a step, a verb that does nothing, and the start.

uv run python benchmarks/ray_ranks.py [--rounds 8]

Two ranks of a 30-million-parameter model on processors, in actors that `RankedPolicy` asks, beside two plain processes
that call the same verbs of the same learners, with gloo and FSDP2 on both sides and a thread for each rank. A step is
old log-probs, reference log-probs, a gradient and an update of 8 sequences of 64 tokens. Steps of the two alternate,
and the best of each side counts: where the machine has other work, that is what both had when it had least. Then a verb
that does nothing, asked of eight actors, the median of 200; and the seconds of a run's start, from no cluster to two
ranks that hold the quickstart's model and two embedded engines. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from r1_cli.build.algorithm import build_schedule
from r1_cli.cluster.actors import ActorGroup, ActorPlacement
from r1_cli.cluster.rank import Rank
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.cluster.ray_cluster import open_cluster
from r1_cli.config import load_config
from r1_cli.config.trainer import TrainerConfig
from r1_cli.hardware import Hardware
from r1_cli.jobs.engines import open_engine, start_engines
from r1_cli.jobs.learner import open_placement, prepare_learner, start_ranks
from r1_cli.models.files import open_model
from r1_cli.placement import place_ranks
from r1_cli.plan.batches import count, make_plan
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel, find_blocks, shard_model
from r1_core.objective import Objective
from r1_core.types import Sample

SEQUENCES, TOKENS, PROMPT, GROUP, VOCAB = 8, 64, 16, 4, 8192
CALLS, MANY = 200, 8
QUICKSTART = Path(__file__).parents[1] / "examples/quickstart/config.yaml"
OBJECTIVE = Objective(kl_penalty="low_var_kl", kl_coef=0.01)


def build(parallel: Parallel) -> tuple[Learner, Objective]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    models = [Qwen2ForCausalLM(config) for _ in range(2)]
    for model in models:
        shard_model(model, find_blocks(model), parallel.mesh)
    optimizer = build_optimizer(models[0].named_parameters(), lr=1e-5)
    batching = Batching(True, MicroLimit(4, 4 * TOKENS), MicroLimit(4, 4 * TOKENS))
    learner = Learner(
        models[0], optimizer, lambda step: 1.0, reference=models[1], batching=batching, parallel=parallel,
        device=torch.device("cpu"),
    )  # fmt: skip
    return learner, OBJECTIVE


def make_samples() -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    return [
        Sample(
            torch.randint(0, VOCAB, (TOKENS,), generator=draw), torch.arange(TOKENS) >= PROMPT,
            torch.arange(TOKENS)[None], index // GROUP, float(index % 2),
        )
        for index in range(SEQUENCES)
    ]  # fmt: skip


def take_step(learner: Any) -> float:
    """Return the seconds of a step."""
    samples, start = make_samples(), time.perf_counter()
    samples = assign(learner.add_logprobs(learner.add_logprobs(samples, ["old_logprobs"]), ["ref_logprobs"]), GRPO())
    learner.forward_backward(samples, OBJECTIVE)
    learner.optim_step()
    return time.perf_counter() - start


# --- two plain processes ----------------------------------------------------------------------------------------------


def serve(pipe: Connection, rank: int, folder: str) -> None:
    """A rank's life: a step whenever it is told to."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    learner, _ = build(Parallel.join("cpu"))
    pipe.send(None)
    while pipe.recv():
        pipe.send(take_step(learner))
    dist.destroy_process_group()


@contextmanager
def plain_ranks() -> Iterator[list[Connection]]:
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [spawn.Pipe() for _ in range(2)]
        processes = [spawn.Process(target=serve, args=(pipes[rank][1], rank, folder)) for rank in range(2)]
        for process in processes:
            process.start()
        ours = [pipe for pipe, _ in pipes]
        for pipe in ours:
            pipe.recv()
        yield ours
        for pipe in ours:
            pipe.send(False)
        for process in processes:
            process.join()


def take_plain_step(pipes: list[Connection]) -> float:
    for pipe in pipes:
        pipe.send(True)
    return max([pipe.recv() for pipe in pipes])


# --- actors -----------------------------------------------------------------------------------------------------------


class Idle:
    def nothing(self) -> None: ...


@contextmanager
def actors(count: int, folder: Path) -> Iterator[tuple[ActorGroup, Any]]:
    """Actors in a cluster of their own, and their placements."""
    with open_cluster(TrainerConfig(n_gpus_per_node=count), Hardware("cpu")) as machines:
        placements = place_ranks(machines.learner)
        found = ActorGroup(
            [ActorPlacement(one.name, one.node, (), folder / f"{one.name}.log", count) for one in placements]
        )
        try:
            yield found, placements
        finally:
            found.close()


def time_verbs(folder: Path) -> float:
    """Return the median milliseconds of a verb that does nothing."""
    with actors(MANY, folder) as (idle, placements):
        idle.create(Idle, [() for _ in placements])
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            idle.call("nothing")
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def time_steps(rounds: int, folder: Path) -> dict[str, float]:
    """Return the best seconds of a step, in actors and in plain processes."""
    with actors(2, folder) as (ranks, placements):
        ranks.create(Rank, [(build, placement.rank, len(placements)) for placement in placements])
        ranks.call("join", ranks.call_first("open_store", placements[0].node.address))
        learner = RankedPolicy(RankClient(ranks))
        with plain_ranks() as pipes:
            pairs = [(take_step(learner), take_plain_step(pipes)) for _ in range(rounds + 1)][1:]
    asked, plain = (min(times) for times in zip(*pairs, strict=True))
    return {"step_s": asked, "plain_step_s": plain, "step_to_plain": asked / plain}


def time_start(folder: Path) -> float:
    """Return the seconds that a run takes to have its ranks and engines, from when it has read its configuration."""
    words = ["trainer.n_gpus_per_node=2", "worker.rollout.name=embedded", f"trainer.save_checkpoint_path={folder}"]
    config, _ = load_config([str(QUICKSTART), *words])
    model, hardware = open_model(config), Hardware("cpu")
    schedule = build_schedule(config, make_plan(config, *count(config)))
    start = time.perf_counter()
    with ExitStack() as stack:
        placement = stack.enter_context(open_placement(config, hardware))
        ranks = start_ranks(config, hardware, placement.ranks, stack)
        engines = start_engines(config, hardware, placement.engines, stack)
        load_learner = prepare_learner(config, hardware, model, schedule, placement.ranks, ranks, stack)
        open_engine(config, hardware, model, placement.engines, engines, stack)
        load_learner()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        found = {"start_s": time_start(at), **time_steps(rounds, at), "verb_ms": time_verbs(at)}
    for name, value in found.items():
        print(f"{name:16} {value:8.3f}")
    print(json.dumps({"benchmark": "ranks", "rounds": rounds, **found}))


if __name__ == "__main__":
    main()
