"""What holds for every loss, KL estimate, correction and filter, whatever the batch."""

import math
from dataclasses import fields, replace

import pytest
import torch
from core_draws import close_gaps, enlarge, few, loss_inputs, move_left, select, take
from hypothesis import example, given
from hypothesis import strategies as st

from r1_core import kl, losses
from r1_core.filtering import EMAStd, MeanRange, NonzeroVariance
from r1_core.kl import KL_ESTIMATORS
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES, Correction, Rejection, ValueLoss, aggregate
from r1_core.losses.correction import diagnose, effective_sample_size, importance_weights, log_gap
from r1_core.objective import Objective
from r1_core.reward_shaping import overlong_punishment
from r1_core.types import Totals

seeds = st.integers(0, 10**6)
SETTINGS = {
    **{name: {"clip_low": 0.2, "clip_high": 0.3} for name in ("gspo", "gspo_token", "luspo")},
    "clip_cov": {"ratio": 0.3, "cov_low": 0.0},
    "kl_cov": {"ratio": 0.3},
}
# Second names of the same thing are left out.
LOSSES = {name: losses.get(name)(**SETTINGS.get(name, {})) for name in set(POLICY_LOSSES) - {"geo_mean", "reinforce"}}
WAYS = sorted(set(AGGREGATIONS) - {"token", "seq"})
# Every loss, and every aggregation with several losses: `aggregate` sees per-token losses, not which loss made them.
PAIRS = [(name, WAYS[place % len(WAYS)]) for place, name in enumerate(sorted(LOSSES))]
close = torch.testing.assert_close


# --- policy losses -----------------------------------------------------------------------------------------------


def loss_and_gradient(name, aggregation, inputs):
    """The objective with every term on, and its gradient in the log-probs."""
    objective = Objective(LOSSES[name], aggregation, "low_var_kl", 0.1, 0.01, off_policy_threshold=0.1)
    output = objective(inputs)
    return output.loss, torch.autograd.grad(output.loss, inputs.logprobs)[0], output.metrics


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@given(seed=seeds)
@few
def test_the_order_of_rows_and_what_is_not_trained_change_no_loss(name, aggregation, seed):
    inputs = select(LOSSES[name], loss_inputs(seed))
    loss, gradient, metrics = loss_and_gradient(name, aggregation, inputs)
    order = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(seed))
    moved = loss_and_gradient(name, aggregation, take(inputs, order))
    close(moved[:2], (loss, gradient[order]))
    larger = loss_and_gradient(name, aggregation, enlarge(inputs, rows=1, columns=2))
    close(larger[:2], (loss, torch.nn.functional.pad(gradient, (0, 2, 0, 1))))
    for other in (moved[2], larger[2]):
        close(other, metrics)


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@given(seed=seeds)
@few
def test_tokens_of_an_environment_between_turns_change_no_loss(name, aggregation, seed):
    inputs = select(LOSSES[name], loss_inputs(seed))
    loss, gradient, metrics = loss_and_gradient(name, aggregation, inputs)
    closed = close_gaps(inputs)
    closed = replace(closed, logprobs=closed.logprobs.detach().requires_grad_())
    found = loss_and_gradient(name, aggregation, closed)
    close(found[:2], (loss, move_left(gradient, inputs.loss_mask)))
    close(found[2], metrics)


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@given(seed=seeds, cut=st.integers(0, 5))
@few
def test_two_micro_batches_add_up_to_the_step(name, aggregation, seed, cut):
    inputs = select(LOSSES[name], loss_inputs(seed, rows=5))
    loss, gradient, _ = loss_and_gradient(name, aggregation, inputs)
    parts = [loss_and_gradient(name, aggregation, take(inputs, rows)) for rows in (slice(0, cut), slice(cut, 5))]
    close(sum(part[0] for part in parts), loss)
    close(torch.cat([part[1] for part in parts]), gradient)


# Thresholds, whose least change has no effect, and bounds that these inputs do not reach.
NOT_SEEN = {"ratio", "cov_low", "cov_high", "clip_dual"}
NOT_SEEN |= {"cispo.clip_low", *(f"dppo_{kind}.clip_{side}" for kind in ("tv", "kl") for side in ("low", "high"))}


def float_settings(entry):
    return [field.name for field in fields(entry) if isinstance(getattr(entry, field.name), float)]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, key)
        for name in sorted(LOSSES)
        for key in float_settings(LOSSES[name])
        if not {key, f"{name}.{key}"} & NOT_SEEN
    ],
)
def test_no_setting_of_a_loss_loses_digits_in_float64(name, setting):
    inputs = loss_inputs(3, rows=20, width=12, spread=1.0)

    def found(factor):
        loss = replace(LOSSES[name], **{setting: getattr(LOSSES[name], setting) * factor})
        return loss(select(loss, inputs))[0].detach()

    # A setting that is rounded to float32 does not see a change in its tenth digit.
    rough, fine = found(1 - 1e-3) - found(1.0), found(1 - 1e-10) - found(1.0)
    affected = rough.abs() > 1e-5
    assert affected.any(), "the inputs do not show what this setting does"
    assert fine[affected].abs().min() > 0


FAR = [50.0, -50.0, 1e4, -1e4]


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_ratios_of_fifty_and_of_ten_thousand_stay_finite(name, aggregation, dtype):
    signs = torch.where(torch.arange(5) % 2 == 0, 1.0, -1.0)
    for shift in [torch.full((5,), far) for far in FAR] + [far * signs for far in FAR]:
        inputs = loss_inputs(3)
        old = inputs.old_logprobs.to(dtype)
        moved = replace(
            inputs,
            logprobs=(old + shift).to(dtype).requires_grad_(),
            old_logprobs=old,
            advantages=inputs.advantages.to(dtype),
            ref_logprobs=inputs.ref_logprobs.to(dtype),
        )
        loss, gradient, metrics = loss_and_gradient(name, aggregation, moved)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_a_batch_without_tokens_is_exactly_zero(name, aggregation, shape):
    inputs = loss_inputs(1, rows=2, width=3)
    inputs = take(inputs, slice(0, shape[0]))
    blank = torch.zeros(shape, dtype=torch.float64)
    hidden = blank + math.nan
    fields = ("advantages", "old_logprobs", "ref_logprobs", "entropy", "weights")
    inputs = replace(
        inputs,
        logprobs=hidden.clone().requires_grad_(),
        loss_mask=blank.bool(),
        totals=Totals(0, 0, 0),
        **dict.fromkeys(fields, hidden),
    )
    loss, gradient, metrics = loss_and_gradient(name, aggregation, inputs)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("clip", [0.2, None])
@given(seed=seeds)
@few
def test_the_value_loss_ignores_order_padding_and_what_is_not_trained(clip, seed):
    inputs = loss_inputs(seed)

    def both(batch):
        mask, leaf = batch.loss_mask, batch.logprobs
        errors, metrics = ValueLoss(clip)(leaf, batch.old_logprobs, batch.advantages, mask)
        loss = aggregate(errors, mask, "seq", inputs.totals)
        clipped = aggregate(metrics["vf_clipfrac"], mask, "token", inputs.totals)
        return loss, torch.autograd.grad(loss, leaf)[0], clipped

    loss, gradient, clipped = both(inputs)
    order = torch.tensor([2, 0, 3, 1])
    close(both(take(inputs, order)), (loss, gradient[order], clipped))
    padded = torch.nn.functional.pad(gradient, (0, 1, 0, 2))
    close(both(enlarge(inputs, rows=2, columns=1)), (loss, padded, clipped))


# --- KL estimates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kl_estimates_and_their_gradients_stay_finite_however_far(name, dtype):
    policy = torch.tensor([*FAR, 0.0, 1e-30], dtype=dtype, requires_grad=True)
    estimate = kl.get(name)(policy, torch.zeros(6, dtype=dtype))
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    assert estimate.isfinite().all()
    assert gradient.isfinite().all()
    assert estimate[4] == gradient[4] == 0 or name in ("kl", "k1")


@pytest.mark.parametrize("name", ["abs", "mse", "low_var_kl"])
@given(gap=st.floats(-1e4, 1e4))
@example(gap=1e-9)
@few
def test_kl_estimates_that_are_distances_are_never_negative_and_pull_back(name, gap):
    policy = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    estimate = kl.get(name)(policy, torch.zeros(1, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    assert estimate >= 0
    assert gradient * gap >= 0


@given(seed=seeds)
@few
def test_the_full_kl_is_not_negative_and_does_not_see_the_order_of_the_vocabulary(seed):
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).mul(20).log_softmax(-1)
    order = torch.randperm(7, generator=generator)
    divergence = kl.full(policy, reference)
    assert (divergence >= 0).all()
    close(kl.full(policy[:, order], reference[:, order]), divergence)
    assert (kl.full(policy, policy) == 0).all()


# --- correction of the rollout -----------------------------------------------------------------------------------

LEVELS = ["token", "sequence", "geometric", None]
CORRECTIONS = [
    Correction(level, upper=2.0, lower=0.5, outside=outside, normalize=normalize)
    for level in LEVELS
    for outside in ("clamp", "zero")
    for normalize in (False, True)
]
REJECTIONS = [
    Rejection(measure, span, 1.5, 0.6 if measure == "k1" else 0.0)
    for measure in ("k1", "k2", "k3")
    for span in ("token", "sum", "mean", "max")
]


def gap_of(inputs):
    return log_gap(inputs.old_logprobs, inputs.logprobs, inputs.loss_mask), inputs.loss_mask


def judged(inputs):
    """What every correction, rejection and diagnostic makes of a batch: per-token tensors, and scalars."""
    gap, mask = gap_of(inputs)
    tokens = [correction.weights(gap, mask) for correction in CORRECTIONS]
    tokens += [rejection.keep(gap, mask).double() for rejection in REJECTIONS]
    return tokens, [*diagnose(gap, mask).values(), *(effective_sample_size(weights, mask) for weights in tokens)]


@given(seed=seeds)
@few
def test_corrections_do_not_see_order_padding_or_what_is_not_trained(seed):
    inputs = loss_inputs(seed, spread=0.8)
    tokens, scalars = judged(inputs)
    order = torch.tensor([3, 1, 0, 2])
    moved = judged(take(inputs, order))
    larger = judged(enlarge(inputs, rows=1, columns=2))
    close(moved[0], [token[order] for token in tokens])
    close(larger[0], [torch.nn.functional.pad(token, (0, 2, 0, 1)) for token in tokens])
    close(moved[1], scalars)
    close(larger[1], scalars)


@pytest.mark.parametrize("shift", FAR)
def test_corrections_of_any_gap_are_finite_and_within_their_bounds(shift):
    inputs = loss_inputs(2)
    inputs = replace(inputs, logprobs=inputs.old_logprobs - shift)
    tokens, scalars = judged(inputs)
    tokens += [importance_weights(*gap_of(inputs), level) for level in LEVELS]
    assert all(token.isfinite().all() for token in tokens)
    assert all(scalar.isfinite() for scalar in scalars)
    for correction, weights in zip(CORRECTIONS, tokens, strict=False):
        trained = weights[inputs.loss_mask]
        if not correction.normalize:
            assert (((trained >= 0.5) & (trained <= 2.0)) | (trained == 0)).all()
            assert correction.outside == "zero" or (trained > 0).all()


def test_a_policy_that_sampled_for_itself_is_left_alone():
    inputs = loss_inputs(4)
    tokens, scalars = judged(replace(inputs, logprobs=inputs.old_logprobs))
    assert all(torch.equal(token, inputs.loss_mask.double()) for token in tokens)
    assert {float(scalar) for scalar in scalars} <= {0.0, 1.0}


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_corrections_of_no_tokens_are_zero_and_keep_nothing(shape):
    gap, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    assert all((correction.weights(gap, mask) == 0).all() for correction in CORRECTIONS)
    assert not any(rejection.keep(gap, mask).any() for rejection in REJECTIONS)
    assert all(value == 0 for value in diagnose(gap, mask).values())


# --- filters and the length punishment ---------------------------------------------------------------------------

FILTERS = {
    "mean range": MeanRange(0.3, 0.7).keep,
    "zero variance": NonzeroVariance().keep,
    "EMA-std": EMAStd(average=0.6, steps_seen=3, step=20, never_empty=False).keep,
}


@pytest.mark.parametrize("name", FILTERS)
@given(seed=seeds)
@few
def test_filters_judge_whole_groups_by_themselves_in_any_order_under_any_name(name, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 4, (12,), generator=generator).double() / 3
    groups = torch.randint(0, 4, (12,), generator=generator)
    kept = FILTERS[name](rewards, groups)
    order = torch.randperm(12, generator=generator)
    assert torch.equal(FILTERS[name](rewards[order], -7 * groups[order] + 10**12), kept[order])
    for group in groups.unique():
        alone = groups == group
        assert torch.equal(FILTERS[name](rewards[alone], groups[alone]), kept[alone])
        assert len(kept[alone].unique()) == 1


@pytest.mark.parametrize("name", FILTERS)
def test_filters_keep_nothing_of_nothing(name):
    assert FILTERS[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 12))
@example(reward=0.9, size=8)
@few
def test_equal_rewards_have_no_spread_to_filter_by(reward, size):
    rewards, groups = torch.full((size,), reward, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    assert not NonzeroVariance().keep(rewards, groups).any()
    assert EMAStd(ema_start_step=0).observe(rewards, groups).average == 0


@given(length=st.integers(0, 10**9), buffer=st.integers(1, 50), more=st.integers(50, 500), factor=st.floats(0, 5))
@few
def test_the_length_punishment_is_bounded_falls_and_scales_with_its_factor(length, buffer, more, factor):
    lengths = torch.tensor([length, length + 1, 0, more])
    punishment = overlong_punishment(lengths, more, buffer, factor)
    assert ((punishment <= 0) & (punishment >= -factor)).all()
    assert punishment[1] <= punishment[0]
    assert punishment[2] == 0
    assert punishment[3] == -factor
    close(punishment, overlong_punishment(lengths, more, buffer) * factor)
