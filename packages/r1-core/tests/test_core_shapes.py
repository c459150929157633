"""Tensors of a wrong shape are refused by name instead of being broadcast into wrong numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_draws import advantage_inputs, loss_inputs
from torch import Tensor

from r1_core import filtering, kl, losses
from r1_core.advantages import ESTIMATORS, GRPO, assign
from r1_core.advantages.statistics import discounted_sums, group_statistics, masked_mean, masked_variance, whiten
from r1_core.learner.logprobs import token_logprobs
from r1_core.losses import aggregate, correction, covariance
from r1_core.objective import Objective
from r1_core.reward_shaping import RewardNormalizer, overlong_punishment
from r1_core.types import Sample, Totals, with_tokens

REWARDS = advantage_inputs(7)  # eight answers, six columns
LOSS = loss_inputs(0)  # four rows, five columns
PER_SAMPLE, PER_TOKEN = torch.ones(4), torch.ones(4, 3)
MASK = torch.ones(4, 3, dtype=torch.bool)
SAMPLE = Sample(torch.arange(4), torch.tensor([False, True, True, True]), torch.arange(4)[None], 0, 1.0)
GIVEN_REWARDS = [
    "token_rewards", "group_ids", "loss_mask", "values", "baselines", "old_logprobs", "squared_probs",
    "correction_weights", "parts",
]  # fmt: skip
GIVEN_LOSS = ["loss_mask", "advantages", "old_logprobs", "ref_logprobs", "entropy", "weights"]


@pytest.mark.parametrize("name", GIVEN_REWARDS)
def test_advantage_inputs_refuse_every_field_of_a_wrong_shape(name: str) -> None:
    value = getattr(REWARDS, name)
    for wrong in (value[0], value[:-1], value[None]):
        with pytest.raises(ValueError, match=r"AdvantageInputs: \w+ has shape \[.*\], expected \[N"):
            replace(REWARDS, **{name: wrong})
    with pytest.raises(TypeError, match=f"AdvantageInputs: {name} is of type list, expected a tensor"):
        replace(REWARDS, **{name: value.tolist()})


def test_rewards_of_answers_in_place_of_those_of_tokens_are_refused() -> None:
    # They made every group-based estimator return zeros.
    with pytest.raises(ValueError, match=r"AdvantageInputs: token_rewards has shape \[8\], expected \[N, R\]"):
        replace(REWARDS, token_rewards=torch.ones(8))


@pytest.mark.parametrize("name", GIVEN_LOSS)
def test_loss_inputs_refuse_every_field_of_a_wrong_shape(name: str) -> None:
    value = getattr(LOSS, name)
    for wrong in (value[0], value[:, :1], value[None]):
        expected = rf"LossInputs: {name} has shape \[.*\], expected \[B, R\] = \[4, 5\]"
        with pytest.raises(ValueError, match=expected):
            replace(LOSS, **{name: wrong})
    with pytest.raises(TypeError, match=f"LossInputs: {name} is of type list"):
        replace(LOSS, **{name: value.tolist()})


def test_required_fields_and_masks_of_truth_values_are_asked_for() -> None:
    with pytest.raises(TypeError, match="LossInputs: advantages is of type NoneType"):
        replace(LOSS, advantages=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LossInputs: loss_mask has dtype torch.int64, expected torch.bool"):
        replace(LOSS, loss_mask=LOSS.loss_mask.long())


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("token_ids", torch.arange(4.0), "token_ids has dtype torch.float32, expected torch.int64 or torch.int32"),
        ("token_ids", torch.arange(4)[None], r"token_ids has shape \[1, 4\], expected \[L\]"),
        ("loss_mask", torch.ones(4), "loss_mask has dtype torch.float32, expected torch.bool"),
        ("loss_mask", torch.ones(1, 4).bool(), r"loss_mask has shape \[1, 4\], expected \[L\] = \[4\]"),
        ("position_ids", torch.arange(4), r"position_ids has shape \[4\], expected \[axes, L\]"),
        ("position_ids", torch.arange(3)[None], r"position_ids has shape \[1, 3\], expected \[axes, L\] = \[1, 4\]"),
        ("advantages", torch.ones(4, 1), r"advantages has shape \[4, 1\], expected \[L\] = \[4\]"),
        ("old_logprobs", torch.tensor(1.0), r"old_logprobs has shape \[\], expected \[L\] = \[4\]"),
        ("turn_ids", torch.ones(4), "turn_ids has dtype torch.float32, expected torch.int64 or torch.int32"),
        ("state_ids", torch.ones(4), "state_ids has dtype torch.float32, expected torch.int64 or torch.int32"),
    ],
)
def test_a_sample_refuses_a_field_of_a_wrong_shape_or_kind(name: str, wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample of group 0: {message}"):
        replace(SAMPLE, **{name: wrong})
    with pytest.raises(TypeError, match=f"sample of group 0: {name} is of type list, expected a tensor"):
        replace(SAMPLE, **{name: wrong.tolist() if wrong.ndim else [1.0]})


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "group_statistics": group_statistics,
    "KeepAll": filtering.KeepAll().keep,
    "MeanRange": filtering.MeanRange().keep,
    "NonzeroVariance": filtering.NonzeroVariance().keep,
    "EMAStd.keep": filtering.EMAStd().keep,
    "EMAStd.observe": filtering.EMAStd().observe,
    "token_covariance": covariance.token_covariance,
}
PAIRS: dict[str, Callable[[Any, Any], object]] = {
    "masked_mean": masked_mean,
    "masked_variance": masked_variance,
    "whiten": whiten,
    "discounted_sums": lambda values, mask: discounted_sums(values, mask, 1.0),
    "aggregate": lambda values, mask: aggregate(values, mask, "token", Totals(12, 4)),
    "ValueLoss.values": lambda values, mask: losses.ValueLoss()(values, PER_TOKEN, PER_TOKEN, mask),
    "ValueLoss.returns": lambda values, mask: losses.ValueLoss()(PER_TOKEN, PER_TOKEN, values, mask),
    "log_gap": lambda values, mask: correction.log_gap(PER_TOKEN, values, mask),
    "importance_weights": lambda values, mask: correction.importance_weights(values, mask, "token"),
    "Correction.keep": losses.Correction(rejections=(losses.Rejection("k1", "token", 2.0),)).keep,
    "diagnose": correction.diagnose,
    "effective_sample_size": correction.effective_sample_size,
    "reward_penalties": lambda values, mask: kl.reward_penalties("k1", PER_TOKEN, values, mask, 0.1),
    "sequence_mean": kl.sequence_mean,
    **{name: lambda values, _, name=name: kl.get(name)(PER_TOKEN, values) for name in kl.KL_ESTIMATORS},
    "full": lambda values, _: kl.full(PER_TOKEN, values),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_reads_one_number_of_each_sample_refuses_other_shapes(name: str) -> None:
    CALLS[name](PER_SAMPLE, PER_SAMPLE.long())
    for wrong in ((PER_TOKEN, PER_SAMPLE), (PER_SAMPLE, PER_SAMPLE[:-1]), (PER_SAMPLE, PER_TOKEN)):
        with pytest.raises(ValueError, match=r"has shape \[.*\], expected"):
            CALLS[name](*wrong)
    with pytest.raises(TypeError, match="is of type list, expected a tensor"):
        CALLS[name]([1.0, 0.0, 1.0, 0.0], PER_SAMPLE)


@pytest.mark.parametrize("name", PAIRS)
def test_what_reads_one_number_of_each_token_refuses_other_shapes(name: str) -> None:
    PAIRS[name](PER_TOKEN, MASK)
    for wrong in (torch.ones(3), torch.ones(4, 1), torch.ones(1, 4, 3)):
        with pytest.raises(ValueError, match=r"has shape \[.*\], expected"):
            PAIRS[name](wrong, MASK)
    with pytest.raises(TypeError, match="is of type list, expected a tensor"):
        PAIRS[name](PER_TOKEN.tolist(), MASK)


def test_what_reads_a_list_of_numbers_refuses_other_shapes() -> None:
    calls: list[Callable[[Any], object]] = [
        RewardNormalizer().observe,
        RewardNormalizer(),
        lambda lengths: overlong_punishment(lengths, 10, 5),
        lambda flat: with_tokens([SAMPLE], advantages=flat),
        lambda targets: token_logprobs(torch.zeros(3, 5), targets),
    ]
    for call in calls:
        for wrong in (PER_TOKEN, torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"has shape \[.*\], expected \[.\]"):
                call(wrong)
        with pytest.raises(TypeError, match="is of type list, expected a tensor"):
            call([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"advantages has shape \[4\], expected \[T\] = \[3\]"):
        with_tokens([SAMPLE], advantages=torch.ones(4))


def test_log_probs_of_batches_and_of_float_targets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token_logprobs: logits has shape \[2, 3, 5\], expected \[T, V\]"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"token_logprobs: targets has dtype torch.float32, expected torch.int64"):
        token_logprobs(torch.zeros(3, 5), torch.zeros(3))


def test_results_of_registered_estimators_and_losses_are_not_broadcast() -> None:
    class OfAnswers(GRPO):
        def __call__(self, inputs: Any) -> Tensor:
            return super().__call__(inputs)[:, :1]

    with pytest.raises(ValueError, match=r"result of OfAnswers: advantages has shape \[1, 1\], expected \[N, R\] = "):
        assign([SAMPLE], OfAnswers())

    class OfRows(losses.PPOClip):
        def __call__(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
            found, metrics = super().__call__(inputs)
            return found.sum(-1, keepdim=True), metrics

    with pytest.raises(ValueError, match=r"result of OfRows: losses has shape \[4, 1\], expected \[B, R\] = \[4, 5\]"):
        Objective(OfRows())(LOSS)


def test_parts_of_other_names_are_refused_by_sample() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has the parts \['a'\]; sample 0 has \['a', 'b'\]"):
        assign([SAMPLE, SAMPLE], ESTIMATORS.get("gdpo")(), parts=[{"a": 1.0, "b": 2.0}, {"a": 1.0}])
    with pytest.raises(ValueError, match=r"baselines has shape \[1\], expected \[N\] = \[2\]"):
        assign([SAMPLE, SAMPLE], ESTIMATORS.get("remax")(), baselines=[1.0])
