"""The arithmetic of a step: mini-batches, weight versions, the KL coefficient, and what a resumed run starts from."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_fakes import Engine, start
from hypothesis import given
from hypothesis import strategies as st
from test_cli_loop import Learner, records, run

from r1_cli.train import loop
from r1_cli.train.groups.stream_position import StreamPosition
from r1_cli.train.types import Position
from r1_core.filtering import EMAStd, KeepAll
from r1_core.kl_control import AdaptiveKL
from r1_core.objective import Objective
from r1_core.reward_shaping import RewardNormalizer
from r1_core.types import Sample


@given(groups=st.integers(1, 20), answers=st.integers(1, 4), prompts=st.integers(1, 8), epochs=st.integers(1, 3))
def test_each_epoch_cuts_all_samples_into_mini_batches_of_whole_groups(
    groups: int, answers: int, prompts: int, epochs: int
) -> None:
    samples: list[Any] = [SimpleNamespace(group_id=group) for group in range(groups) for _ in range(answers)]
    batches = list(loop.minibatches(samples, prompts, epochs))
    assert [sample for batch in batches for sample in batch] == samples * epochs
    assert len(batches) == epochs * -(-groups // prompts)
    assert all(len({sample.group_id for sample in batch}) <= prompts for batch in batches)


@dataclass
class Recording(Learner):
    """Remembers what it was trained on; its policy is one nat a token above the reference."""

    batches: list[tuple[list[int], float]] = field(default_factory=list)  # group ids, coefficient of the KL

    def add_logprobs(self, samples: Sequence[Sample], needs: Any) -> list[Sample]:
        zeros = [torch.zeros(len(sample.token_ids)) for sample in samples]
        return [replace(s, old_logprobs=zero, ref_logprobs=zero - 1) for s, zero in zip(samples, zeros, strict=True)]

    def forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        self.batches.append(([sample.group_id for sample in samples], objective.kl_coef))
        return {}


def recorded(folder: Path, *, prompts: int = 4, epochs: int = 1, steps: int = 1) -> tuple[loop.Run, Recording]:
    """A run of four groups a step that records what its learner is given."""
    parts, learner = run(folder, steps=steps), Recording()
    update = replace(
        parts.update, objective=replace(parts.update.objective, kl_penalty="kl"), needs=frozenset({"old_logprobs"})
    )
    schedule = replace(parts.schedule, global_batch_size=prompts, ppo_epochs=epochs)
    return replace(parts, learner=learner, update=update, schedule=schedule), learner


@pytest.mark.parametrize(("prompts", "expected"), [(4, [4]), (3, [3, 1]), (1, [1, 1, 1, 1])])
def test_a_step_trains_on_all_its_groups_the_last_partial_mini_batch_too(
    tmp_path: Path, prompts: int, expected: list[int]
) -> None:
    parts, learner = recorded(tmp_path, prompts=prompts, epochs=2)
    loop.train(parts, start(KeepAll()))
    assert [len(set(groups)) for groups, _ in learner.batches] == expected * 2
    assert learner.steps == len(expected) * 2
    assert {group for groups, _ in learner.batches for group in groups} == {0, 1, 2, 3}


def test_a_checkpoint_holds_the_position_after_its_own_step(tmp_path: Path) -> None:
    parts, _ = recorded(tmp_path, steps=4)
    parts = replace(parts, schedule=replace(parts.schedule, save_freq=2))
    end = loop.train(parts, start(KeepAll()))
    assert parts.store.steps() == [2, 4]
    states = [json.loads((parts.store.path(step) / "trainer.json").read_text()) for step in (2, 4)]
    assert [state["step"] for state in states] == [2, 4]
    assert {name: states[1][name] for name in end.state()} == json.loads(json.dumps(end.state()))
    assert states[0]["cursor"] < states[1]["cursor"]


def test_each_step_samples_from_the_weights_of_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions, active = list[int](), Engine.active

    def noting(engine: Engine, source: Any) -> AbstractContextManager[None]:
        versions.append(source.version)
        return active(engine, source)

    monkeypatch.setattr(Engine, "active", noting)
    loop.train(run(tmp_path, steps=3), start(KeepAll()))
    assert versions == [0, 1, 2]
    assert [record["staleness/max"] for record in records(tmp_path)] == [0, 0, 0]


def test_the_coefficient_of_the_kl_follows_its_controller_from_step_to_step(tmp_path: Path) -> None:
    parts, learner = recorded(tmp_path, steps=3)
    end = loop.train(parts, replace(start(KeepAll()), kl=AdaptiveKL(0.1, target=0.1, horizon=100)))
    used = [coef for _, coef in learner.batches]
    samples = len(learner.batches[0][0])
    assert used == pytest.approx([0.1 * (1 + 0.2 * samples / 100) ** step for step in range(3)])
    assert end.kl.coef == pytest.approx(used[-1] * (1 + 0.2 * samples / 100))


def test_a_resumed_run_starts_from_all_that_its_checkpoint_holds() -> None:
    begin = Position(0, StreamPosition(), AdaptiveKL(0.1, 0.2, 100), EMAStd(), RewardNormalizer())
    late = replace(
        begin,
        step=7,
        stream=StreamPosition(3, 9, (1, 2)),
        kl=AdaptiveKL(0.37, 0.2, 100),
        filter=replace(EMAStd(), step=8, average=0.4, steps_seen=2),
        normalizer=RewardNormalizer(1.0, 2.0, 3),
        idle=2,
        failed=1,
        skipped=4,
        micro_batches={"worker.actor": 4},
    )
    resumed = begin.resume(late.state())
    for one in fields(Position):
        assert getattr(resumed, one.name) == getattr(late, one.name), one.name
        assert getattr(begin, one.name) != getattr(late, one.name), "nothing would show that it was lost"
