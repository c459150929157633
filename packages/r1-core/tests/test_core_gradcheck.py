"""Gradients of every loss, KL estimate, the critic's loss and the entropy, against finite differences in float64."""

from dataclasses import replace

import pytest
import torch
from core_draws import loss_inputs, select
from torch.autograd import grad, gradcheck

from r1_core import kl, losses
from r1_core.kl import EXPONENT_LIMIT, KL_ESTIMATORS
from r1_core.learner.logprobs import token_logprobs
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES, ValueLoss, aggregate
from r1_core.losses.policy import row_mean, token_gap
from r1_core.objective import Objective

WIDE = {"clip_low": 0.2, "clip_high": 0.3}
TIGHT = {"clip_low": 0.04, "clip_high": 0.05, "clip_dual": 1.5}
SETTINGS = {
    "default": WIDE | {"clip_dual": 1.5},
    "gspo": WIDE | {"clip_dual": 1.5},
    "gspo_token": WIDE,
    "luspo": WIDE,
    "clip_cov": {"ratio": 0.3, "cov_low": 0.0},
    "kl_cov": {"ratio": 0.3},
    "cispo": WIDE,
    "dppo_tv": TIGHT,
    "dppo_kl": TIGHT,
}
# Second names of the same loss or average are left out.
LOSSES = sorted(set(POLICY_LOSSES) - {"geo_mean", "reinforce"})
WAYS = sorted(set(AGGREGATIONS) - {"token", "seq"})


def build(name):
    return losses.get(name)(**SETTINGS.get(name, {}))


def clipped(ratio, advantages):
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))


def frozen_gspo_token(logprobs, at):
    sequence = row_mean(token_gap(at), at.loss_mask)
    return clipped((sequence + logprobs - at.logprobs).exp(), at.advantages)


def frozen_cispo(logprobs, at):
    return -token_gap(at).exp().clamp(0.8, 1.3) * at.advantages * logprobs


def frozen_vespo(logprobs, at):
    weight = token_gap(at).sum(-1, keepdim=True).exp()
    good = weight.pow(2) * (3 * (1 - weight)).exp()
    bad = weight.pow(3) * (2 * (1 - weight)).exp()
    return -torch.where(at.advantages >= 0, good, bad) * at.advantages * logprobs


def frozen_dppo(logprobs, at, held):
    weight = torch.where(held, 0.0, token_gap(at).exp().clamp(max=1.5))
    return -weight * at.advantages * logprobs


def frozen_dppo_tv(logprobs, at):
    rise = at.logprobs.exp() - at.old_logprobs.exp()
    return frozen_dppo(logprobs, at, torch.where(at.advantages > 0, rise > 0.05, rise < -0.04))


def frozen_dppo_kl(logprobs, at):
    new, old = at.logprobs.exp(), at.old_logprobs.exp()
    kl_of_token = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    away = torch.where(at.advantages > 0, (new > old) & (kl_of_token > 0.05), (new < old) & (kl_of_token > 0.04))
    return frozen_dppo(logprobs, at, away)


# These hold a part of the formula fixed (sg): the formula in the log-probs, with that part as it is `at` the inputs.
FROZEN = {
    "gspo_token": frozen_gspo_token,
    "cispo": frozen_cispo,
    "vespo": frozen_vespo,
    "dppo_tv": frozen_dppo_tv,
    "dppo_kl": frozen_dppo_kl,
}


@pytest.mark.parametrize("aggregation", WAYS)
@pytest.mark.parametrize("name", sorted(set(LOSSES) - set(FROZEN)))
def test_the_gradient_of_a_loss_is_that_of_its_value(name, aggregation):
    loss = build(name)
    inputs = select(loss, loss_inputs(11))
    objective = Objective(loss, aggregation)
    assert gradcheck(lambda x: objective(replace(inputs, logprobs=x)).loss, inputs.logprobs, eps=1e-7, atol=1e-6)
    assert grad(objective(inputs).loss, inputs.logprobs)[0].count_nonzero() > 3


@pytest.mark.parametrize("aggregation", WAYS)
@pytest.mark.parametrize("name", sorted(FROZEN))
def test_the_gradient_of_a_loss_with_a_fixed_part_is_that_of_the_rest(name, aggregation):
    inputs = replace(loss_inputs(11), weights=None)
    mask = inputs.loss_mask
    # A copy, because gradcheck moves the log-probs in place.
    at = replace(inputs, logprobs=inputs.logprobs.detach().clone())

    def frozen(logprobs):
        return aggregate(FROZEN[name](logprobs, at), mask, aggregation, inputs.totals)

    assert gradcheck(frozen, inputs.logprobs, eps=1e-7, atol=1e-6)
    expected = frozen(inputs.logprobs)
    loss = Objective(build(name), aggregation)(inputs).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(grad(value, inputs.logprobs)[0] for value in (loss, expected)))


@pytest.mark.parametrize("name", sorted(set(KL_ESTIMATORS) - {"kl", "mse", "low_var_kl", "k1+", "k3+"}))
@pytest.mark.parametrize("aggregation", WAYS)
def test_the_gradient_of_a_kl_term_is_that_of_its_value(name, aggregation):
    inputs = loss_inputs(5)
    objective = Objective(build("gpg"), aggregation, name, kl_coef=0.7)
    assert gradcheck(lambda x: objective(replace(inputs, logprobs=x)).loss, inputs.logprobs)


def test_k3_goes_on_pulling_past_the_limit_of_its_exponential():
    gap = torch.tensor([EXPONENT_LIMIT - 0.5, EXPONENT_LIMIT + 0.5, EXPONENT_LIMIT + 30], dtype=torch.float64)
    policy = (-gap).requires_grad_()
    assert gradcheck(lambda x: kl.k3(x, torch.zeros_like(x)) / EXPONENT_LIMIT**2, policy, rtol=1e-5)
    slopes = grad(kl.k3(policy, torch.zeros_like(gap)).sum(), policy)[0].tolist()
    assert slopes[2] <= slopes[1] < slopes[0] < 0


def test_the_gradient_of_the_full_kl_is_that_of_its_value():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    assert gradcheck(lambda x: kl.full(x.log_softmax(-1), reference), logits)


@pytest.mark.parametrize("aggregation", WAYS)
@pytest.mark.parametrize("clip", [0.2, None])
def test_the_gradient_of_the_value_loss_is_that_of_its_value(clip, aggregation):
    inputs = loss_inputs(8)
    mask = inputs.loss_mask

    def loss(values):
        errors, _ = ValueLoss(clip)(values, inputs.old_logprobs, inputs.advantages, mask)
        return aggregate(errors, mask, aggregation, inputs.totals)

    assert gradcheck(loss, inputs.logprobs)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_gradients_of_log_probs_and_entropy_are_those_of_their_values(temperature):
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3])

    def both(x):
        return token_logprobs(x, targets, temperature, with_entropy=True, entropy_gradient=True)

    assert gradcheck(both, logits)


def test_the_entropy_bonus_pulls_by_its_coefficient():
    inputs = loss_inputs(8)
    entropy = inputs.entropy.clone().requires_grad_()
    objective = Objective(aggregation="seq", entropy_coef=0.3)
    (gradient,) = grad(objective(replace(inputs, entropy=entropy)).loss, entropy)
    (mean,) = grad(aggregate(entropy, inputs.loss_mask, "seq", inputs.totals), entropy)
    torch.testing.assert_close(gradient, -0.3 * mean)
