"""What the driver of a run on many devices does by itself in a step, while all devices wait for it.

uv run python benchmarks/driver.py [--sequences 1536 …] [--tokens 4096] [--profile]

A step of `r1_cli.train.loop`, GRPO with a KL term and four optimizer steps, around an engine that has its answers
ready, rewards that are known, and stand-ins of eight ranks that answer at once: what remains is the driver's own work,
from completions to samples, columns, advantages and metrics, with what it copies into the object store. Groups of 8
answers on prompts of 512 tokens, of `--tokens` in all. Memory is the peak of the process above what its imports take,
and so holds the answers themselves. Processor seconds of one thread are shown beside wall time, because a machine has
other work; the best of three steps counts.

Then 64 prompts with a picture each, rendered as on a machine of a cluster, 8 answers to each: the bytes that are put
into the object store for model inputs, there and on the way to engines and ranks, to the bytes that these have in the
precision the model computes in. The last line is one JSON object.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from scale_parts.counted import Traffic
from scale_parts.ranks import StandInRanks

from r1_cli.build.rendering import build_renderer
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import StopRequest
from r1_cli.cluster.batch_transfer import pack_samples
from r1_cli.cluster.engine import EngineInfo
from r1_cli.cluster.engines import RemoteEnginePool
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.cluster.remote_rendering import RenderWorker
from r1_cli.config import load_config
from r1_cli.models.files import open_model
from r1_cli.runs.track import RunInfo, Tracker
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train import loop
from r1_cli.train.groups.advantages import AdvantageComputer
from r1_cli.train.groups.group import Group, Response, to_sample
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.recorder import Recorder
from r1_cli.train.types import Collected, Position, Schedule, Update
from r1_core.advantages import GRPO
from r1_core.filtering import KeepAll
from r1_core.kl_control import FixedKL
from r1_core.objective import Objective
from r1_core.reward_shaping import RewardNormalizer
from r1_data.types import Example, Prompt
from r1_rewards.types import Score
from r1_rollout.types import Completion

RANKS = 8
PROMPT, ANSWERS, UPDATES, ROUNDS = 512, 8, 4, 3
STEP = 60 / 1536  # seconds of a step of others for each sequence
PICTURES, SIDE = 64, 896  # pixels, of which Qwen2.5-VL makes 64 × 64 patches
QUICKSTART = "examples/quickstart/config.yaml"


class Taking:
    """An engine's process that takes whatever comes."""

    def __init__(self, traffic: Traffic) -> None:
        self.put = traffic.put

    def call(self, verb: str, *args: Any) -> EngineInfo:
        return EngineInfo(("float32",), True)


class Engine:
    """Has its answers ready."""

    def __init__(self, prompts: int, response: int) -> None:
        self.groups = [make_group(row, response) for row in range(prompts)]

    @contextmanager
    def active(self, source: Any = None) -> Iterator[None]:
        yield

    def rows_of(self, at: Position) -> list[int]:
        return []

    def collect(self, at: Position, watch: Stopwatch) -> Collected:
        for stage in ("gen", "reward"):
            with watch(stage):
                pass
        return self.groups, at, {}


class Silent:
    def stage(self, name: str) -> None: ...
    def log(self, step: int, record: Any) -> None: ...
    def log_generations(self, step: int, rows: Any) -> None: ...
    def close(self) -> None: ...


def make_group(row: int, response: int) -> Group:
    draw = np.random.default_rng(row)
    prompt = Prompt(str(row), "?", draw.integers(0, 150_000, PROMPT).tolist(), [], torch.arange(PROMPT)[None], "1")
    responses = []
    for index in range(ANSWERS):
        tokens, logprobs = draw.integers(0, 150_000, response), -draw.random(response)
        score = Score(float(index % 2), {"overall": float(index % 2), "format": 1.0})
        completion = Completion(tokens.astype(np.int32), logprobs.astype(np.float32), "stop", 0)
        responses.append(Response(completion, "?", score, score.value))
    return Group(prompt, responses)


def make_run(engine: Engine, ranks: StandInRanks, folder: Path) -> loop.Run:
    prompts = len(engine.groups)
    schedule = Schedule(
        total_steps=1, rollout_batch_size=prompts, global_batch_size=prompts // UPDATES, ppo_epochs=1,
        max_idle_steps=-1, train_generations_to_log=1, val_freq=-1, val_before_train=False, save_freq=-1,
        save_model_only=False,
    )  # fmt: skip
    needs = frozenset({"old_logprobs", "ref_logprobs"})
    return loop.Run(
        learner=RankedPolicy(RankClient(ranks)),
        engine=engine,
        collector=engine,
        update=Update(AdvantageComputer(GRPO()), Objective(kl_penalty="low_var_kl"), needs),
        schedule=schedule,
        validation=None,
        store=(store := CheckpointStore(folder)),
        saver=Saver(store),
        recorder=Recorder(folder, 0),
        tracker=Tracker([], RunInfo("project", "name", folder, {}, resumed_from=0), Silent()),
        stop=StopRequest(),
        assets=dict,
    )


def measure_steps(sequences: int, tokens: int, profile: bool, before: int) -> dict[str, float]:
    """Take steps; return the best one's seconds, and the peak of memory above what it was `before`, in bytes."""
    response = tokens - PROMPT
    ranks = StandInRanks(RANKS, tokens=response)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Engine(sequences // ANSWERS, response), ranks, Path(folder))
        at = Position(0, StreamPosition(), FixedKL(0.01), KeepAll(), RewardNormalizer())
        profiler = cProfile.Profile(time.process_time)
        for _ in range(ROUNDS):
            gc.collect()
            wall, processor, stored = time.perf_counter(), time.process_time(), ranks.traffic.stored
            if profile:
                profiler.enable()
            loop.take_step(run, at)
            profiler.disable()
            times.append((time.process_time() - processor, time.perf_counter() - wall))
            stored = ranks.traffic.stored - stored
        if profile:
            pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "processor_s": min(times)[0],
        "wall_s": min(wall for _, wall in times),
        "memory_gb": (peak - before) / 1e9,
        "stored_bytes_a_token": stored / (sequences * tokens),
    }


def measure_pictures() -> float:
    """Return the bytes in the object store to those of the prompts' model inputs, in the model's precision.

    Rendered as on a machine of a cluster, sent to two engines, and trained on, `ANSWERS` samples a prompt.
    """
    config, _ = load_config([QUICKSTART])
    renderer, store = build_renderer(config, open_model(config), own_sizes=True), Traffic()
    host = RenderWorker(renderer, lambda _: nullcontext(), 0, torch.bfloat16, store.put)
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    picture = Image.effect_noise((SIDE, SIDE), 50).convert("RGB")
    example = Example("rows:0", [{"role": "user", "content": content}], (picture,), "3")
    prompts = [host.render((0, 0, row), example) for row in range(PICTURES)]
    engines = RemoteEnginePool([("engine", Taking(store))] * 2, max_sequences=8, dtype=None)
    engines._put = store.put
    engines._prepare(prompts)
    pack_samples([to_sample(prompt, [1]) for prompt in prompts for _ in range(ANSWERS)], store.put, torch.bfloat16)
    whole = renderer.render(example).model_inputs.values()
    return store.stored / PICTURES / sum(2 * t.numel() if t.is_floating_point() else t.nbytes for t in whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1536])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, before = [], psutil.Process().memory_info().rss
    for sequences in sorted(asked.sequences):
        found = measure_steps(sequences, asked.tokens, asked.profile, before)
        found["share"] = found["wall_s"] / (found["wall_s"] + STEP * sequences)
        rows.append({"sequences": sequences, **found})
        print(*(f"{name} {value:.4g}" for name, value in rows[-1].items()), sep="  ", flush=True)
    pictures = measure_pictures()
    print(f"pictures {pictures:.4f}")
    load = round(os.getloadavg()[0], 1)
    said = {"tokens": asked.tokens, "load_after": load, "rows": rows, "share_ratio": rows[0]["share"]}
    print(json.dumps({"benchmark": "driver", **said, "pictures": pictures}))


if __name__ == "__main__":
    main()
