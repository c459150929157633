"""Prompts, completions and scores become samples whose every tensor lines up."""

import dataclasses
import math

import pytest
import torch
from cli_groups import change, group, of_version

from r1_cli.train.groups.group import extend_positions, to_samples
from r1_cli.train.metrics.step import (
    SHARE,
    agreement,
    count_idle,
    divergence,
    mean_of,
    reward_metrics,
    spread,
    staleness,
)
from r1_core.types import tokens
from r1_rewards.types import Failure, Score


def test_samples_keep_order_and_mask_the_prompt() -> None:
    samples = to_samples([group(["a", "b"], [0.0, 1.0]), group(["c"], [0.5], prompt_tokens=2)])
    assert [s.group_id for s in samples] == [0, 0, 1]
    assert [s.reward for s in samples] == [0.0, 1.0, 0.5]
    second = samples[1]
    assert second.token_ids.tolist() == [0, 1, 2, 7, 7]
    assert second.loss_mask.tolist() == [False, False, False, True, True]
    assert second.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert second.rollout_logprobs is not None
    assert second.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]


def test_rotary_axes_go_on_from_the_largest_position_of_any() -> None:
    prompt = torch.tensor([[0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 4, 2], [0, 1, 1, 2]])
    extended = extend_positions(prompt, 2)
    assert extended[:, 4:].tolist() == [[4, 5], [5, 6], [5, 6], [5, 6]]


def test_a_sample_with_a_misfit_tensor_is_refused() -> None:
    sample = to_samples([group(["a"], [0.0])])[0]
    with pytest.raises(ValueError, match=r"old_logprobs has shape \[2\], expected \[L\] = \[4\]"):
        type(sample)(sample.token_ids, sample.loss_mask, sample.position_ids, 0, 0.0, old_logprobs=torch.zeros(2))


def test_a_failed_score_is_never_correct() -> None:
    assert not Score(1.0, {"accuracy": 1.0}, Failure("timeout", "30 s")).is_correct


def test_failures_are_counted_by_cause() -> None:
    failed = change(group(["a", "b"], [1.0, 0.0]), 1, score=Score(0.0, {"overall": 0.0}, Failure("timeout", "30 s")))
    record = reward_metrics([failed])
    assert record["reward/failures"] == 1.0
    assert record["reward/failures/timeout"] == 1.0
    assert record["reward/overall"] == 0.5
    assert record["reward/accuracy"] == 1.0  # the failed answer reported none


def test_steps_without_signal_are_counted_and_apart_from_those_whose_rewards_all_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failure = Score(0.0, {"overall": 0.0}, Failure("timeout", "30 s"))
    one_failed = change(group(["a", "b"], [1.0, 1.0]), 1, score=failure)
    all_failed = change(one_failed, 0, score=failure)
    samples = to_samples([one_failed])
    assert count_idle(2, 1, [one_failed], samples) == (3, 0)
    assert count_idle(2, 1, [all_failed], samples) == (3, 2)
    learning = [dataclasses.replace(sample, advantages=sample.loss_mask.float()) for sample in samples]
    assert count_idle(2, 1, [one_failed], learning) == (0, 0)
    assert count_idle(2, 1, [one_failed], learning, taught=True) == (0, 0)
    assert count_idle(2, 1, [one_failed], samples, taught=True) == (3, 0)
    assert "is it the policy itself" in caplog.messages[-1]


def test_a_dropped_answer_leaves_its_group_and_is_still_counted() -> None:
    whole = group(["a", "b", "c"], [1.0, 0.5, 0.0])
    left = change(whole, 1, score=Score(-1.0, {}, Failure("timeout", "30 s"), keep=False)).without_failures()
    assert [response.text for response in left.responses] == ["a", "c"]
    assert [len(completion.token_ids) for completion in left.completions] == [1, 3]
    assert [score.value for score in left.scores] == [1.0, 0.0]
    record = reward_metrics([left])
    assert record["reward/failures/timeout"] == 1.0
    assert record["reward/overall"] == 0.5
    assert left.without_failures() is left


def test_agreement_is_perfect_when_engine_and_learner_say_the_same() -> None:
    samples = [
        dataclasses.replace(s, old_logprobs=s.rollout_logprobs) for s in to_samples([group(["a", "b"], [0.0, 1.0])])
    ]
    assert agreement(samples) == {
        "rollout/logprob_gap_mean": 0.0,
        "rollout/logprob_gap_max": 0.0,
        "rollout/kl": 0.0,
        "rollout/kl_k3": 0.0,
        "rollout/chi2": 0.0,
        "rollout/effective_sample_size": 1.0,
    }


def test_groups_of_older_weights_are_told_apart_from_those_of_this_step() -> None:
    fresh, kept = of_version(7, group(["a", "b"], [0.0, 1.0])), of_version(6, group(["c"], [1.0]))
    groups = [kept, fresh]
    samples = [
        dataclasses.replace(s, old_logprobs=s.rollout_logprobs + 0.25 * (s.group_id == 0))  # type: ignore[operator]
        for s in to_samples(groups)
    ]
    record = staleness(7, groups, samples)
    assert record["staleness/mean"] == pytest.approx(1 / 3)
    assert (record["rollout/logprob_gap_mean"], record["rollout/stale_logprob_gap_mean"]) == (0.0, 0.25)
    alone = staleness(6, [kept], samples[:1])
    assert alone["staleness/mean"] == 0
    assert not any(name.startswith("rollout/stale_") for name in alone)


def test_means_are_over_those_that_report() -> None:
    assert mean_of([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}
    assert spread("x", [1, 3]) == {"x/mean": 2.0, "x/max": 3.0, "x/min": 1.0}


def test_numbers_of_a_step_are_the_same_as_if_all_tokens_were_looked_at_at_once() -> None:
    """They are added up over shares of samples; the last share is smaller, and some samples train nothing."""
    draw = torch.Generator().manual_seed(0)
    samples = []
    for index in range(2 * SHARE + 5):
        sample = to_samples([group(["a"] * (1 + index % 3), [0.0] * (1 + index % 3))])[-1]
        old, ref = (-torch.rand(len(sample.token_ids), generator=draw) for _ in range(2))
        mask = sample.loss_mask & torch.tensor(index % 5 > 0)
        samples.append(dataclasses.replace(sample, old_logprobs=old, ref_logprobs=ref, loss_mask=mask))
    gap = (tokens(samples, "old_logprobs") - tokens(samples, "rollout_logprobs")).double()
    weights = gap.exp()
    found = agreement(samples, "")
    assert found == pytest.approx(
        {
            "logprob_gap_mean": float(gap.abs().mean()),
            "logprob_gap_max": float(gap.abs().max()),
            "kl": float(-gap.mean()),
            "kl_k3": float((weights - 1 - gap).mean()),
            "chi2": float(weights.square().mean() - 1),
            "effective_sample_size": float(weights.sum() ** 2 / (len(gap) * weights.square().sum())),
        }
    )
    away = [float((s.old_logprobs - s.ref_logprobs)[s.loss_mask].mean()) for s in samples if s.loss_mask.any()]  # type: ignore[operator]
    assert divergence(samples, "kl") == pytest.approx(sum(away) / len(away), abs=1e-6)
    none = [dataclasses.replace(s, loss_mask=s.loss_mask & False) for s in samples]
    assert divergence(none, "kl") == 0.0
    assert agreement(none, "")["effective_sample_size"] == 1.0
    wrong = [*samples[:-1], dataclasses.replace(samples[-1], old_logprobs=samples[-1].old_logprobs + torch.nan)]  # type: ignore[operator]
    assert math.isnan(agreement(wrong, "")["logprob_gap_max"])
    assert math.isnan(agreement(wrong, "")["effective_sample_size"])
