"""What holds for every advantage estimator, whatever the batch."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from core_draws import advantage_inputs, close_gaps, enlarge, few, move_left
from hypothesis import example, given
from hypothesis import strategies as st

from r1_core.advantages import ESTIMATORS, GAE, GRPOPassK, Reinforce, ReMax

seeds = st.integers(0, 10**6)
BUILDERS = {name: ESTIMATORS.get(name) for name in ESTIMATORS}
close = torch.testing.assert_close


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - {"gpg", "gdpo", "lite_ppo"}))
@given(seed=seeds, rows=st.integers(1, 3))
@few
def test_rows_without_tokens_change_no_other_advantage(name, seed, rows):
    # GPG (N / M), GDPO and Lite PPO (std of the batch) count answers, those without tokens too.
    inputs = advantage_inputs(seed)
    got = BUILDERS[name]()(enlarge(inputs, rows, columns=2))
    assert (got[len(inputs.group_ids) :] == 0).all()
    close(got[: len(inputs.group_ids), :-2], BUILDERS[name]()(inputs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(BUILDERS))
@given(seed=seeds)
@few
def test_tokens_of_an_environment_between_turns_change_no_advantage(name, seed):
    inputs = advantage_inputs(seed)
    found = BUILDERS[name]()(close_gaps(inputs))
    close(found, move_left(BUILDERS[name]()(inputs), inputs.mask), rtol=1e-9, atol=1e-12)


def scaled(inputs, scale=1.0, shift=0.0):
    """Every number that is measured in rewards: those of the answers, of the greedy ones, and a critic's."""
    last = inputs.mask & (inputs.mask.cumsum(-1) == inputs.mask.sum(-1, keepdim=True))
    return replace(
        inputs,
        token_rewards=torch.where(last, inputs.token_rewards * scale + shift, 0.0),
        baselines=inputs.baselines * scale + shift,
        values=inputs.values * scale + shift,
        parts=inputs.parts * scale + shift,
    )


def gae_advantages(inputs):
    return GAE(0.9, 0.8).estimate(inputs)[0]


LINEAR = {
    **{name: BUILDERS[name]() for name in ("dr_grpo", "rloo", "opo", "gpg", "remax", "optimal_token_baseline")},
    "grpo_passk": GRPOPassK(norm_by_std=False),
    "reinforce_baseline": Reinforce(whiten=False),
    "reinforce leave_one_out": Reinforce("leave_one_out", whiten=False),
    "gae": gae_advantages,
    "gigpo": BUILDERS["gigpo"](norm_by_std=False),
}
# What divides by a spread has an eps, so that this holds as far as the spread is large beside it.
INVARIANT = {
    "grpo": BUILDERS["grpo"](eps=1e-12),
    "grpo_passk": GRPOPassK(eps=1e-12),
    "maxrl": BUILDERS["maxrl"](),
    "lite_ppo": BUILDERS["lite_ppo"](eps=1e-12),
    "gdpo": BUILDERS["gdpo"](reward_weights=(1.0, 0.3)),
    "reinforce group_norm": Reinforce("group_norm", whiten=False, eps=1e-12),
    "reinforce_plus_plus": BUILDERS["reinforce_plus_plus"](),
    "reinforce_plus_plus_baseline": BUILDERS["reinforce_plus_plus_baseline"](),
    "reinforce_baseline": Reinforce(),
    "gae": GAE(0.9, 0.8),
    "gigpo": BUILDERS["gigpo"](eps=1e-12),
}
# GiGPO discounts a reward in the turns before it, so that a shift is not the same in all of them.
UNMOVED = {name: estimate for name, estimate in (LINEAR | INVARIANT).items() if name not in ("maxrl", "gae", "gigpo")}
SCALES = st.sampled_from([0.25, 3.0, 1024.0])


@pytest.mark.parametrize("name", LINEAR)
@given(seed=seeds, scale=SCALES)
@few
def test_advantages_that_are_differences_scale_with_the_rewards(name, seed, scale):
    inputs = advantage_inputs(seed)
    close(LINEAR[name](scaled(inputs, scale)), LINEAR[name](inputs) * scale, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", INVARIANT)
@given(seed=seeds, scale=SCALES)
@few
def test_advantages_divided_by_a_spread_do_not_see_the_scale(name, seed, scale):
    inputs = scaled(advantage_inputs(seed), 4096.0)
    close(INVARIANT[name](scaled(inputs, scale)), INVARIANT[name](inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", UNMOVED)
@given(seed=seeds, shift=st.sampled_from([-8.0, 0.5, 1000.0]))
@few
def test_a_baseline_takes_every_shift_away(name, seed, shift):
    inputs = advantage_inputs(seed)
    close(UNMOVED[name](scaled(inputs, shift=shift)), UNMOVED[name](inputs), rtol=1e-7, atol=1e-7)


GROUPS = torch.tensor([4, 4, 9, 9, 9, 4, 4, 9])
NEAR = torch.tensor([0.01, -0.01, 0.0, 0.01, 0.0025, -0.0075, 0.0031, -0.0099], dtype=torch.float64)


def exact(name, rewards, lengths):
    """The formula of each answer in rational numbers, the square root alone in float64."""
    answers = []
    whole = sum(rewards) / len(rewards)
    batch_std = math.sqrt(sum((reward - whole) ** 2 for reward in rewards) / (len(rewards) - 1))
    for i, group in enumerate(GROUPS.tolist()):
        members = [j for j, other in enumerate(GROUPS.tolist()) if other == group]
        values = [rewards[j] for j in members]
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        high, second = sorted(values)[:-3:-1]
        weighed = sum(lengths[j] * rewards[j] for j in members) / sum(lengths[j] for j in members)
        answers.append(
            {
                "grpo": float(rewards[i] - mean) / (std + 1e-6),
                "dr_grpo": float(rewards[i] - mean),
                "rloo": float((rewards[i] - mean) * len(values) / (len(values) - 1)),
                "grpo_passk": float(high - second) / (std + 1e-6) * (rewards[i] == high),
                "opo": float(rewards[i] - weighed),
                "gpg": float(rewards[i] - mean),
                "maxrl": float((rewards[i] - mean) / mean),
                "lite_ppo": float(rewards[i] - mean) / (batch_std + 1e-6),
            }[name]
        )
    return torch.tensor(answers, dtype=torch.float64)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "grpo_passk", "opo", "gpg", "maxrl", "lite_ppo"])
@pytest.mark.parametrize("offset", [0.5, 1000.0, 1e6])
def test_rewards_far_from_zero_keep_their_digits(name, offset):
    rewards = offset + NEAR
    inputs = advantage_inputs(5, rewards, GROUPS)
    lengths = [int(length) for length in inputs.mask.sum(-1)]
    expected = exact(name, [Fraction(value) for value in rewards.tolist()], lengths)
    got = BUILDERS[name]()(inputs)
    close(got[inputs.mask], expected[:, None].expand(got.shape)[inputs.mask], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "reinforce_baseline"])
def test_whitened_rewards_of_1000_plus_or_minus_a_hundredth_keep_their_digits(name):
    inputs = advantage_inputs(5, 1000 + NEAR, GROUPS)
    rewards = [Fraction(value) for value in (1000 + NEAR).tolist()]
    if name != "reinforce_plus_plus":
        groups = GROUPS.tolist()
        means = {group: sum(r for r, g in zip(rewards, groups, strict=True) if g == group) / 4 for group in groups}
        rewards = [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]
    counts = inputs.mask.sum(-1).tolist()
    tokens = [reward for reward, count in zip(rewards, counts, strict=True) for _ in range(count)]
    mean = sum(tokens) / len(tokens)
    squares = sum((token - mean) ** 2 for token in tokens)
    variance = float(squares) / (len(tokens) - (name != "reinforce_baseline"))
    scale = math.sqrt(variance + (1e-8 if name != "reinforce_baseline" else 0.0))
    expected = torch.tensor([float(token - mean) / scale for token in tokens], dtype=torch.float64)
    close(BUILDERS[name]()(inputs)[inputs.mask], expected, rtol=1e-6, atol=1e-9)


NO_EPS = {name: {"eps": 0.0} for name in ("grpo", "grpo_passk", "lite_ppo")}
NO_EPS["reinforce_baseline"] = {"baseline": "group_norm", "eps": 0.0}


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "grpo_passk", "opo", "gpg", "reinforce_baseline", "lite_ppo"]
)
@given(reward=st.floats(-1e300, 1e300), size=st.integers(1, 12))
@example(reward=0.1, size=30)
@few
def test_equal_rewards_of_any_size_give_exactly_zero(name, reward, size):
    inputs = advantage_inputs(7, torch.full((size,), reward, dtype=torch.float64), torch.full((size,), -3))
    assert (BUILDERS[name]()(inputs) == 0).all()
    assert (BUILDERS[name](**NO_EPS.get(name, {}))(inputs) == 0).all()


def test_equal_returns_give_exactly_zero_to_remax_and_the_optimal_token_baseline():
    inputs = advantage_inputs(7, torch.full((6,), 0.9, dtype=torch.float64), torch.zeros(6, dtype=torch.int64))
    assert (BUILDERS["optimal_token_baseline"]()(inputs) == 0).all()
    assert (ReMax()(replace(inputs, baselines=torch.full((6,), 0.9, dtype=torch.float64))) == 0).all()


CLIPPED = {
    "gae": GAE(0.9, 0.8),
    "reinforce_plus_plus": BUILDERS["reinforce_plus_plus"](0.9),
    "reinforce_baseline": Reinforce(),
}


@pytest.mark.parametrize("name", CLIPPED)
@given(seed=seeds)
@few
def test_without_the_spread_whitening_takes_off_the_mean_alone(name, seed):
    inputs = advantage_inputs(seed)
    mask = inputs.mask
    centred = replace(CLIPPED[name], norm_by_std=False)(inputs)
    assert abs(centred[mask].mean()) < 1e-12
    scale = centred[mask].std(unbiased=name != "reinforce_baseline").nan_to_num(0.0)
    close(CLIPPED[name](inputs) * scale, centred, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_clipping_rewards_is_clipping_them_before_the_penalties(name):
    inputs = advantage_inputs(6, torch.tensor([30.0, -30.0, 3.0]).double(), torch.tensor([0, 0, 1]))
    inputs = replace(inputs, token_penalties=torch.full(inputs.mask.shape, 0.5).double())
    clamped = replace(inputs, token_rewards=inputs.token_rewards.clamp(-10, 10))
    close(replace(CLIPPED[name], reward_clip=(-10.0, 10.0))(inputs), CLIPPED[name](clamped))


def test_reinforce_clips_what_is_left_of_a_score_without_its_baseline():
    inputs = advantage_inputs(6, torch.tensor([130.0, 100.0]).double(), torch.tensor([0, 0]))
    advantages = Reinforce(reward_clip=(-10.0, 10.0), whiten=False)(inputs)
    assert [float(row[mask][0]) for row, mask in zip(advantages, inputs.mask, strict=True)] == [10.0, -10.0]


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_the_wrong_way_round_is_refused(name):
    with pytest.raises(ValueError, match="reward_clip is"):
        BUILDERS[name](reward_clip=(1.0, -1.0))
