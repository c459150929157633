"""Sampling ahead in real runs: an engine in its own process, and resuming bit for bit."""

import json
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from endtoend import QUICKSTART, R1, SMALL, read_log, without_clock
from safetensors.torch import load_file

from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.sampling.async_sampler import AsyncSampler

STEPS = 5
AHEAD = [
    *SMALL, f"trainer.max_steps={STEPS}", "trainer.val_before_train=false", "trainer.val_freq=4", "trainer.save_freq=2",
    "trainer.save_limit=-1", "trainer.max_staleness=2", "trainer.timeline=4", "algorithm.online_filtering=true",
    "algorithm.filter_key=accuracy", "algorithm.rollout_correction.rollout_is=token",
]  # fmt: skip


def terminate_in_step(number: int, patch: pytest.MonkeyPatch) -> None:
    """Send this process SIGTERM when that step waits for its groups, and those of a later one are being sampled."""
    collect = AsyncSampler.collect

    class Terminating(Stopwatch):
        def __call__(self, stage: str) -> AbstractContextManager[None]:
            if stage == "wait":
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(stage)

    def terminating(async_sampler: AsyncSampler, at: Any, source: Any, watch: Stopwatch) -> Any:
        return collect(async_sampler, at, source, Terminating() if at.step + 1 == number else watch)

    patch.setattr(AsyncSampler, "collect", terminating)


@pytest.mark.slow
def test_a_run_that_samples_ahead_goes_on_from_a_checkpoint_and_after_sigterm_to_the_bit(
    r1: R1, tmp_path: Path
) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    r1("train", QUICKSTART, *AHEAD, f"trainer.save_checkpoint_path={whole}")
    words = ["train", QUICKSTART, *AHEAD, f"trainer.save_checkpoint_path={again}"]
    with pytest.MonkeyPatch.context() as patch:
        terminate_in_step(4, patch)
        ended = r1(*words, f"trainer.load_checkpoint_path={whole / 'global_step_2'}", ok=False)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output
    assert sorted(path.name for path in (again / "global_step_3").glob("ahead_*")) == ["ahead_0", "ahead_1"]
    r1(*words)
    records = without_clock(read_log(whole))
    ages = [record["staleness/min"] for record in records]
    assert ages[:3] == [0, 1, 2]
    assert min(ages[3:]) >= 2, "groups that were kept are older still"
    assert all(record["rollout/canary_gap"] < 1e-5 for record in records)
    assert records[2:] == without_clock(read_log(again))
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(path / f"global_step_{STEPS}/actor" / name) for path in (whole, again))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    events = json.loads((whole / "timeline.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {threads[event["tid"]] for event in events if event["name"] == "gen"} >= {"r1-sampling_0"}
