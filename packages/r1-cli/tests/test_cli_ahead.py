"""Sampling ahead: which weights sample which step is a rule, a checkpoint holds what they sampled, errors end it."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fakes import DrainableEngine, Engine, Equality, Prompts, collector, start
from fake_vllm import FakeServer
from server_pools import Pools, weights
from test_cli_loop import run

from r1_cli.cluster.own_process import OwnProcess
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train import loop
from r1_cli.train.sampling.async_sampler import AsyncSampler, load_pending_steps, save_pending_steps, snapshot
from r1_cli.train.types import Collected, Position
from r1_core.filtering import KeepAll
from r1_rewards.types import RewardFailure, RewardInput
from r1_rollout.weights import LocalWeights

STEPS = 8


def sampled(of: AsyncSampler, at: Position, until: int = STEPS) -> tuple[list[Collected], Position]:
    """Take steps that only sample; return what they were given, and where they ended."""
    found = []
    while at.step < until:
        collected = of.collect(at, LocalWeights(weights(), at.step), Stopwatch())
        found.append(collected)
        at = loop.replace(collected[1], step=at.step + 1)
    return found, at


def described(found: Sequence[Collected]) -> list[Any]:
    """All that a step is given but the time that it took."""
    return [
        (
            [(group.row, group.completions, group.rewards) for group in groups],
            after.state() | {"step": 0},  # of the chain; the loop counts its own
            [(group.row, group.completions) for group in after.stream.carried_over],
            {name: value for name, value in metrics.items() if not name.startswith("timing_s/")},
        )
        for groups, after, metrics in found
    ]


def make(k: int, engine: Any = None, *, rows: int = 10_000, steps: int = STEPS, **changes: Any) -> AsyncSampler:
    engine = engine or Engine(room=8, rate=0.6)
    return AsyncSampler(collector(engine, max_age=1 + k, rows=rows), engine, staleness=k, total_steps=steps, **changes)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_each_step_is_sampled_by_the_weights_k_steps_before_it(k: int) -> None:
    found, _ = sampled(make(k), start())
    newest = [max(group.version for group in groups) for groups, _, _ in found]
    assert newest == [max(0, step - k) for step in range(STEPS)]
    kept = sum(len(after.stream.carried_over) for _, after, _ in found)
    assert kept, "groups that were not needed are the next step's first, as without sampling ahead"
    assert described(found) == described(sampled(make(k), start())[0])


def test_servers_sample_ahead_by_the_weights_that_they_have_been_given_for_it() -> None:
    runs, steps = [], 5
    for servers in ([FakeServer()], [FakeServer(), FakeServer()]):
        with ExitStack() as stack:
            async_sampler = make(2, Pools(stack).open(*servers, max_sequences=8), rows=48, steps=steps)
            found, _ = sampled(async_sampler, start(KeepAll()), steps)
            async_sampler.close()
        assert [groups[0].version for groups, _, _ in found] == [0, 0, 0, 1, 2]
        assert {label.partition("-")[0] for server in servers for label in server.served} == {"0", "1", "2"}
        runs.append(described(found))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("cut", [1, 3, STEPS - 1])
@pytest.mark.parametrize("engine", [Engine, DrainableEngine])
def test_a_run_that_is_cut_anywhere_goes_on_with_the_groups_that_were_sampled_ahead(
    tmp_path: Path, cut: int, engine: Any
) -> None:
    whole, _ = sampled(make(2, engine(8, 0.6)), start())
    first = make(2, engine(8, 0.6))
    _, at = sampled(first, start(), cut)
    save_pending_steps(first.drain(), tmp_path)
    resumed = load_pending_steps(tmp_path, start(), Prompts().__getitem__)
    assert len(resumed) == min(2, STEPS - cut)
    again, _ = sampled(make(2, engine(8, 0.6), resumed=resumed), at)
    assert described(again) == described(whole[cut:])


def test_the_engine_gets_a_copy_of_weights_that_change_meanwhile() -> None:
    live = torch.ones(2)
    copied = dict(snapshot(LocalWeights([("w", live)], 3)).names())  # type: ignore[call-overload]
    live.zero_()
    assert copied["w"].tolist() == [1, 1]


def test_a_run_whose_sampling_fails_ahead_ends_at_its_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail_late(inputs: Sequence[RewardInput]) -> None:
        calls.append(len(inputs))
        if len(calls) > 4:
            raise RewardFailure("the judge is gone")

    of = run(tmp_path, verifier=Equality(fail_late))
    of = loop.replace(of, schedule=loop.replace(of.schedule, save_freq=1))
    async_sampler = AsyncSampler(of.collector, of.engine, staleness=2, total_steps=6)
    with pytest.raises(RewardFailure, match="the judge is gone"):
        loop.train(loop.replace(of, async_sampler=async_sampler), start(loop.replace(start()).filter))
    # Groups 1 to 4 were sampled: the checkpoint of step 2 holds those of steps 3 and 4, one of step 3 lacks the fifth.
    assert of.store.steps() == [1, 2]
    assert "resume from the last checkpoint" in caplog.text


def test_a_process_that_dies_is_named_with_its_log(tmp_path: Path) -> None:
    process = OwnProcess("engine-0", tmp_path / "engine-0.log", threads=1)
    try:
        process.create(dict, [("x", 3)])
        assert process.call("get", "x") == 3
        with pytest.raises(KeyError) as caught:
            process.call("pop", "y")
        assert "engine-0" in caught.value.__notes__[0]
        assert process.pid
        os.kill(process.pid, signal.SIGTERM)  # is for the driver to take
        assert process.call("get", "x") == 3
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=r"engine-0, process \d+, died in get .*\n.*engine-0.log"):
            process.call("get", "x")
    finally:
        process.close()
