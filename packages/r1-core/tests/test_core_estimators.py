"""Properties of every advantage estimator, of the scan and the whitening they share, and of what is filtered."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r1_core import kl
from r1_core.advantages import ESTIMATORS, GAE, GRPO, AdvantageInputs, Reinforce, ReinforcePlusPlus, ReMax, assign
from r1_core.advantages.statistics import discounted_sums, masked_mean, masked_variance, scan, whiten
from r1_core.filtering import EMAStd, KeepAll, MeanRange, NonzeroVariance
from r1_core.kl_control import AdaptiveKL, FixedKL
from r1_core.losses import Correction
from r1_core.own import as_estimator
from r1_core.reward_shaping import overlong_punishment
from r1_core.types import Sample

# GDPO takes no penalties; test_core_gdpo.py asks the same of it.
EVERY = sorted(set(ESTIMATORS) - {"gdpo"})
# These compare an answer with its group alone, so that equal rewards leave exactly nothing.
BY_GROUP = ["grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl"]
WHITENED = ["reinforce_baseline", "reinforce_plus_plus_baseline"]
quick = settings(max_examples=20)


def make_inputs(seed, rewards=None, groups=None, gaps=True, width=7):
    """Random inputs with every optional field: ragged groups in any order, unequal lengths, NaN off the mask."""
    generator = torch.Generator().manual_seed(seed)
    count = len(rewards) if rewards is not None else int(torch.randint(1, 9, (), generator=generator))
    uniform = torch.rand(count, width, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.randint(0, width + 1, (count, 1), generator=generator)
    mask = mask & (uniform[..., 0] < 0.7) if gaps else mask
    mask[:, 0] = True
    ids = torch.randint(-2, 2, (count,), generator=generator) * 10**9 if groups is None else torch.tensor(groups)
    rewards = uniform[:, 0, 1] if rewards is None else torch.tensor(rewards, dtype=torch.float64)
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))

    def off_mask(values, filler=math.nan):
        return torch.where(mask, values, filler)

    return AdvantageInputs(
        torch.where(last, rewards[:, None], 0.0),
        ids,
        mask,
        token_penalties=off_mask(uniform[..., 2] * 0.0),
        values=off_mask(uniform[..., 3]),
        baselines=torch.full((count,), 0.5, dtype=torch.float64),
        old_logprobs=off_mask(uniform[..., 4].log()),
        squared_probs=off_mask(uniform[..., 4].square() + uniform[..., 5] * (1 - uniform[..., 4]).square()),
        turns=torch.where(mask, torch.arange(width) // 2, -1),
        states=torch.where(mask, (4 * uniform[:, torch.arange(width) // 2, 5]).long(), 0),
    )


def take(inputs, rows):
    fields = (getattr(inputs, name) for name in AdvantageInputs.__dataclass_fields__)
    return AdvantageInputs(*(value if value is None else value[rows] for value in fields))


def recursion(values, mask, decay):
    """The definition of the scan, token by token."""
    sums = torch.zeros(values.shape[0], values.shape[1] + 1, dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        sums[:, t] = torch.where(mask[:, t], values[:, t] + decay * sums[:, t + 1], sums[:, t + 1])
    return sums[:, :-1]


@pytest.mark.parametrize("name", EVERY)
@given(seed=st.integers(0, 10**6))
@quick
def test_order_of_rows_and_names_of_groups_do_not_matter(name, seed):
    inputs = make_inputs(seed)
    estimate = ESTIMATORS.get(name)()
    order = torch.randperm(len(inputs.group_ids), generator=torch.Generator().manual_seed(seed))
    renamed = take(inputs, order)
    renamed.group_ids.mul_(-3).add_(17)
    torch.testing.assert_close(estimate(renamed), estimate(inputs)[order], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EVERY)
@given(seed=st.integers(0, 10**6), columns=st.integers(1, 5))
@quick
def test_padding_changes_nothing_and_gets_nothing(name, seed, columns):
    inputs = make_inputs(seed)
    estimate = ESTIMATORS.get(name)()

    def pad(value, filler):
        return torch.nn.functional.pad(value, (0, columns), value=filler)

    padded = AdvantageInputs(
        pad(inputs.token_rewards, 0.0),
        inputs.group_ids,
        pad(inputs.loss_mask, False),
        *(pad(getattr(inputs, name), math.nan) for name in ("token_penalties", "values")),
        inputs.baselines,
        *(pad(getattr(inputs, name), math.nan) for name in ("old_logprobs", "squared_probs")),
        turns=pad(inputs.turns, -1),
        states=pad(inputs.states, 0),
    )
    wide = estimate(padded)
    assert wide.isfinite().all()
    assert (wide[~padded.loss_mask] == 0).all()
    torch.testing.assert_close(wide[:, :-columns], estimate(inputs), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (3, 4)])
def test_empty_batches_and_rows_without_tokens_give_zero(name, shape):
    zeros = torch.zeros(shape, dtype=torch.float64)
    rows = torch.zeros(shape[0], dtype=torch.float64)
    inputs = AdvantageInputs(
        zeros, torch.arange(shape[0]), zeros.bool(), zeros * math.nan, zeros * math.nan, rows, zeros, zeros, zeros,
        turns=zeros.long(), states=zeros.long(),
    )  # fmt: skip
    advantages = ESTIMATORS.get(name)()(inputs)
    assert advantages.shape == shape
    assert (advantages == 0).all()


@pytest.mark.parametrize("name", BY_GROUP)
@given(reward=st.floats(0, 1e3), size=st.integers(1, 40), seed=st.integers(0, 10**6))
@quick
def test_a_group_of_equal_rewards_gets_exactly_zero_beside_any_other(name, reward, size, seed):
    rewards = [reward] * size + [0.0, 1.0]
    inputs = make_inputs(seed, rewards, groups=[5] * size + [3, 3])
    advantages = ESTIMATORS.get(name)()(inputs)
    assert (advantages[:size] == 0).all()
    assert (advantages[size:] != 0).any()


@pytest.mark.parametrize("name", [*BY_GROUP, *WHITENED, "reinforce_plus_plus"])
@pytest.mark.parametrize("size", [1, 8, 30])
def test_a_batch_of_equal_rewards_gets_exactly_zero(name, size):
    inputs = make_inputs(3, [0.9] * size, groups=[1] * size)
    assert (ESTIMATORS.get(name)()(inputs) == 0).all()


@pytest.mark.parametrize("name", ["optimal_token_baseline", *WHITENED, *BY_GROUP])
def test_groups_of_one_get_zero(name):
    inputs = make_inputs(1, [0.3, 0.7, 0.1], groups=[1, 2, 3])
    assert (ESTIMATORS.get(name)()(inputs) == 0).all()


@given(
    seed=st.integers(0, 10**6), decay=st.sampled_from([0.0, 1e-200, 1e-60, 0.3, 0.9, 0.999, 1.0]), gaps=st.booleans()
)
@settings(max_examples=60)
def test_the_scan_equals_the_recursion(seed, decay, gaps):
    mask = make_inputs(seed, gaps=gaps, width=30).loss_mask
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    values = torch.where(mask, values, 0.0)
    got = discounted_sums(values, mask, decay)
    torch.testing.assert_close(torch.where(mask, got, 0.0), torch.where(mask, recursion(values, mask, decay), 0.0))


@pytest.mark.parametrize("decay", [0.5, 0.95])
def test_the_scan_stays_exact_over_many_chunks(decay):
    mask = torch.rand(2, 9000, generator=torch.Generator().manual_seed(0)) < 0.9
    values = torch.where(mask, torch.linspace(-1, 2, 9000, dtype=torch.float64), 0.0)
    got = discounted_sums(values, mask, decay)
    torch.testing.assert_close(got, recursion(values, mask, decay), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("decay", [-0.1, 1.1])
def test_the_scan_refuses_a_decay_outside_its_range(decay):
    with pytest.raises(ValueError, match="decay is"):
        discounted_sums(torch.ones(1, 2), torch.ones(1, 2).bool(), decay)


@pytest.mark.parametrize("gamma_per", ["token", "turn"])
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_gae_equals_its_definition_token_by_token(gamma, lam, gamma_per):
    inputs = make_inputs(11, [0.2, 0.9, 0.4])
    values = torch.where(inputs.mask, inputs.values, 0.0)
    expected = torch.zeros_like(values)
    for row in range(len(values)):
        following, advantage, turn = 0.0, 0.0, None
        for t in reversed(inputs.mask[row].nonzero().flatten().tolist()):
            decay = 1.0 if gamma_per == "turn" and inputs.turns[row, t] == turn else gamma
            advantage = inputs.token_rewards[row, t] + decay * following - values[row, t] + decay * lam * advantage
            following, expected[row, t], turn = values[row, t], advantage, inputs.turns[row, t]
    advantages, returns = GAE(gamma, lam, gamma_per=gamma_per).estimate(inputs)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


@given(
    seed=st.integers(0, 10**6),
    decay=st.sampled_from([0.0, 0.7, 1.0]),
    turn_decay=st.sampled_from([0.0, 1e-60, 0.5, 1.0]),
)
@settings(max_examples=60)
def test_the_scan_over_turns_equals_the_recursion(seed, decay, turn_decay):
    inputs = make_inputs(seed, width=30)
    mask, turns = inputs.loss_mask, inputs.turns
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    got = scan(values, mask, decay, turns, turn_decay)
    for row in range(len(mask)):
        total, turn = 0.0, None
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            total = float(values[row, t]) + decay * (1.0 if turns[row, t] == turn else turn_decay) * total
            turn = turns[row, t]
            assert float(got[row, t]) == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_turns_before_an_observation_are_credited_with_what_came_after():
    inputs = AdvantageInputs(
        torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]),
        torch.tensor([0, 0]),
        torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool(),
    )
    advantages = ReinforcePlusPlus()(inputs)
    assert advantages[0, 0] == advantages[0, 2] == advantages[0, 3] > 0


@pytest.mark.parametrize(
    ("name", "field"), [("gae", "values"), ("remax", "baselines"), ("optimal_token_baseline", "old")]
)
def test_a_missing_field_is_named(name, field):
    inputs = AdvantageInputs(torch.ones(1, 1), torch.tensor([0]), torch.ones(1, 1).bool())
    with pytest.raises(ValueError, match=field):
        ESTIMATORS.get(name)()(inputs)


def test_maxrl_refuses_negative_rewards_by_row():
    with pytest.raises(ValueError, match=r"sample 1 \(group 7\) has reward -1"):
        ESTIMATORS.get("maxrl")()(make_inputs(0, [1.0, -1.0], groups=[7, 7]))


def test_maxrl_averages_successes_alone():
    advantages = ESTIMATORS.get("maxrl")()(make_inputs(0, [1.0, 0.0, 0.0, 0.0], groups=[0] * 4))
    assert advantages[:, 0].tolist() == [3.0, -1.0, -1.0, -1.0]


def test_gpg_makes_up_for_groups_that_teach_nothing():
    advantages = ESTIMATORS.get("gpg")()(make_inputs(0, [1.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1]))
    assert advantages[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "rewards", "groups", "expected"),
    [
        ("rloo", [1.0, 0.0, 0.0, 0.0], [0] * 4, 1.0),  # 3/4 · 4/3
        ("gpg", [1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1], 10 / 9),  # 5/3 · 2/3
    ],
)
def test_ratios_of_counts_are_exact_in_float64(name, rewards, groups, expected):
    advantages = ESTIMATORS.get(name)()(make_inputs(0, rewards, groups=groups))
    assert float(advantages[0, 0]) == pytest.approx(expected, abs=1e-15)


def test_weights_of_a_correction_reach_the_optimal_token_baseline_in_float64():
    seen = []
    estimator = as_estimator(lambda inputs: seen.append(inputs.correction_weights) or inputs.spread(inputs.rewards))
    one = sample(1.0, 0, [0, 1, 1, 1])
    assign([replace(one, rollout_logprobs=torch.full((4,), -0.7))], estimator, correction=Correction())
    gap = -1.0 - float(torch.tensor(-0.7))
    assert seen[0].tolist() == [[pytest.approx(math.exp(gap), abs=1e-15)] * 3]


def test_whitened_values_have_mean_zero_and_variance_one():
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 1e6
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    white = whiten(values.masked_fill(~mask, math.nan), mask)
    assert abs(float(masked_mean(white, mask))) < 1e-12
    assert float(masked_variance(white, mask)) == pytest.approx(1, abs=1e-8)
    assert (white[~mask] == 0).all()


@pytest.mark.parametrize("build", [Reinforce, ReinforcePlusPlus])
def test_without_the_division_whitening_keeps_the_scale(build):
    inputs = make_inputs(3, rewards=[0.0, 10.0, 20.0, 20.0], groups=[0, 0, 1, 1], gaps=False)
    white, centered = build()(inputs), build(norm_by_std=False)(inputs)
    mask = inputs.loss_mask.bool()
    assert masked_mean(centered, mask) == pytest.approx(0, abs=1e-9)
    scale = masked_variance(centered, mask, unbiased=build is ReinforcePlusPlus).sqrt()
    torch.testing.assert_close(white * scale, centered, rtol=1e-6, atol=1e-6)
    assert whiten(torch.full(mask.shape, 0.1), mask, norm_by_std=False).eq(0).all()


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl", "k1+", "k3+"])
def test_kl_penalties_off_the_mask_are_zero_even_from_nan(name):
    logprobs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    penalties = kl.reward_penalties(name, logprobs, torch.tensor([[-2.0, 1.0]]), torch.tensor([[True, False]]), 0.5)
    assert penalties[0, 1] == 0
    assert penalties[0, 0] == 0.5 * kl.get(name)(torch.tensor(-1.0), torch.tensor(-2.0))
    assert not penalties.requires_grad


@pytest.mark.parametrize(("name", "value"), [("k1+", "kl"), ("k3+", "low_var_kl")])
def test_straight_through_forms_take_their_gradient_from_k2(name, value):
    ref = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    logprobs = torch.tensor([-2.0, -0.5], dtype=torch.float64, requires_grad=True)
    estimate = kl.get(name)(logprobs, ref)
    torch.testing.assert_close(estimate, kl.get(value)(logprobs, ref))
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    torch.testing.assert_close(gradient, (logprobs - ref).detach())


def test_full_kl_is_the_expectation_of_k1_and_survives_impossible_tokens():
    policy = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64).log()
    reference = torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]], dtype=torch.float64).log()
    torch.testing.assert_close(kl.full(policy, reference), torch.tensor([math.log(2), 0.0], dtype=torch.float64))


def test_the_adaptive_controller_moves_towards_its_target_within_bounds():
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    assert controller.update(10.0, 100).coef == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0, 100).coef == pytest.approx(0.1 * 0.98)
    assert controller.update(0.05, 100).coef == pytest.approx(0.1)
    assert FixedKL(0.3).update(9.0, 5).coef == 0.3


def test_the_adaptive_coefficient_never_falls_to_zero_or_below():
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    assert controller.update(0.0, 4999).coef > 0
    with pytest.raises(ValueError, match="horizon is 1000 samples, and a step has 5000"):
        controller.update(0.0, 5000)


@pytest.mark.parametrize("divergence", [math.nan, math.inf, -math.inf])
def test_a_divergence_that_is_not_finite_ends_no_run(divergence, caplog):
    controller = AdaptiveKL(0.1, target=0.05, horizon=1000)
    assert controller.update(divergence, 100) == controller
    assert f"the mean KL is {divergence}, so its coefficient stays 0.1" in caplog.text


@pytest.mark.parametrize("settings", [{"target": 0.0, "horizon": 5}, {"target": 1.0, "horizon": 0}])
def test_the_adaptive_controller_refuses_what_it_would_divide_by(settings):
    with pytest.raises(ValueError, match="must be above 0"):
        AdaptiveKL(0.1, **settings)


def test_overlong_punishment_falls_in_a_line_and_stays_at_minus_one():
    lengths = torch.tensor([0, 80, 90, 100, 500])
    assert overlong_punishment(lengths, 100, 20).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="buffer is 0"):
        overlong_punishment(lengths, 100, 0)


GROUPS = torch.tensor([8, 8, 2, 2, 5, 5, 1])
REWARDS = torch.tensor([0.0, 1.0, 1.0, 1.0, math.nan, 1.0, 0.5])


def test_filters_keep_whole_groups_and_drop_what_is_not_a_number():
    assert MeanRange().keep(REWARDS, GROUPS).tolist() == [True, True, False, False, False, False, True]
    assert NonzeroVariance().keep(REWARDS, GROUPS).tolist() == [True, True, False, False, False, False, False]
    assert KeepAll().keep(REWARDS, GROUPS).all()
    ready = EMAStd(step=11, average=0.5, steps_seen=1)
    assert ready.keep(REWARDS, GROUPS).tolist() == [True, True, False, False, False, False, False]
    alike = ready.keep(REWARDS[2:], GROUPS[2:])
    assert alike.tolist() == [True, True, False, False, True], (
        "without a group over the threshold, all finite ones stay"
    )


def test_ema_std_averages_its_first_steps_plainly_and_then_slowly():
    ema = EMAStd(ema_start_step=2, filter_start_step=4, ratio=0.9)
    pair = torch.tensor([0, 0])
    ema = ema.observe(torch.tensor([0.0, 9.0]), pair)
    assert (ema.step, ema.average, ema.metrics) == (2, None, {})
    for spread in [1.0, 3.0]:
        assert ema.threshold is None
        ema = ema.observe(torch.tensor([0.0, spread]), pair)
    assert ema.average == pytest.approx(2.0 / math.sqrt(2))
    assert ema.threshold == pytest.approx(1.0 / math.sqrt(2))
    assert ema.metrics == {"ema_mean": ema.average, "ema_threshold": ema.threshold}
    ema = ema.observe(torch.tensor([0.0, 0.0]), pair)
    assert ema.average == pytest.approx(0.9 * 2.0 / math.sqrt(2))


def test_ema_std_is_not_moved_by_steps_without_a_std():
    ema = EMAStd(ema_start_step=1, filter_start_step=3)
    after = ema.observe(torch.tensor([1.0, math.nan, 2.0]), torch.tensor([0, 1, 1]))
    assert after == replace(ema, step=2)
    late = replace(after, step=9)
    assert late.keep(torch.tensor([1.0]), torch.tensor([0])).tolist() == [True]


def test_a_filter_goes_on_from_its_state_as_json_holds_it():
    ema = EMAStd(beta=0.7, ema_start_step=1, filter_start_step=2)
    pair = torch.tensor([0, 0])
    for spread in (1.0, 0.1, 0.3):
        ema = ema.observe(torch.tensor([0.0, spread]), pair)
        assert (
            EMAStd(beta=0.7, ema_start_step=1, filter_start_step=2).resume(json.loads(json.dumps(ema.state()))) == ema
        )
    for plain in (MeanRange(), NonzeroVariance(), KeepAll()):
        assert plain.observe(REWARDS, GROUPS) is plain.resume(plain.state()) is plain


def test_ema_std_needs_a_step_before_it_filters():
    with pytest.raises(ValueError, match="filter_start_step is 6"):
        EMAStd(ema_start_step=6, filter_start_step=6)


def sample(reward, group, mask, logprob=-1.0):
    length = len(mask)
    return Sample(
        torch.zeros(length, dtype=torch.int64),
        torch.tensor(mask).bool(),
        torch.zeros(1, length, dtype=torch.int64),
        group,
        reward,
        old_logprobs=torch.full((length,), logprob),
        ref_logprobs=torch.full((length,), -1.5),
    )


def test_assign_hands_over_baselines_values_and_the_kl():
    samples = [sample(1.0, 0, [0, 1, 1]), sample(0.0, 0, [0, 1, 0, 1])]
    greedy = assign(samples, ReMax(), baselines=[0.25, 0.25])
    assert greedy[1].advantages.tolist() == [0.0, -0.25, 0.0, -0.25]
    forecasts = [torch.tensor([9.0, 0.5, 0.5]), torch.tensor([9.0, 0.0, 9.0, 0.0])]
    critic = assign([replace(s, values=v) for s, v in zip(samples, forecasts, strict=True)], GAE())
    assert critic[0].advantages[1] > 0 > critic[1].advantages[1]
    # k1 is 0.5 a token: the first token of two bears both penalties, the last its own.
    penalised = assign(samples, Reinforce(whiten=False), kl_penalty="kl", kl_coef=0.1)
    torch.testing.assert_close(penalised[0].advantages, torch.tensor([0.0, 0.5 - 0.1, 0.5 - 0.05]))
    summed = assign(samples, GRPO(), kl_penalty="kl", kl_coef=0.1)
    assert summed[0].advantages[2] > 0


def test_assign_names_the_sample_that_lacks_log_probs_for_the_kl():
    bare = Sample(torch.zeros(1, dtype=torch.int64), torch.ones(1).bool(), torch.zeros(1, 1, dtype=torch.int64), 4, 1.0)
    with pytest.raises(ValueError, match=r"sample 0 \(group 4\) lacks"):
        assign([bare], GRPO(), kl_penalty="kl", kl_coef=0.1)
