"""GRPO advantages: the formula, the groups it refuses to judge, and how samples get theirs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r1_core import advantages
from r1_core.advantages import GRPO, AdvantageInputs, assign
from r1_core.own import as_estimator
from r1_core.types import Sample


def estimate(rewards, group_ids, **settings):
    rewards = torch.tensor(rewards, dtype=torch.float64)[:, None]
    inputs = AdvantageInputs(rewards, torch.tensor(group_ids), torch.ones_like(rewards, dtype=torch.bool))
    return GRPO(**settings)(inputs)[:, 0]


def sample(reward, group_id, answer, prompt=2):
    length = prompt + answer
    return Sample(
        torch.arange(length), torch.arange(length) >= prompt, torch.arange(length)[None], group_id, reward
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "group_ids", "expected"),
    [
        (
            [-1.175, -0.383, -1.471, -1.801, 0.13, 1.596, 0.993, -2.364],
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0.053610, 1.360051, -0.434655, -0.979006, 0.023675, 0.865076, 0.518988, -1.407740],
        ),
        (
            [999.99024, 1000.00345, 1000.01544, 1000.01225, 1000.00249, 1000.00217, 999.99678, 1000.00244],
            [0, 0, 0, 0, 1, 1, 1, 1],
            [-1.339635, -0.168064, 0.895307, 0.612392, 0.543271, 0.428898, -1.497569, 0.525400],
        ),
    ],
)
def test_grpo_matches_reference_numbers(rewards, group_ids, expected):
    # The second case loses its variance to cancellation unless it is computed in two passes.
    torch.testing.assert_close(estimate(rewards, group_ids).tolist(), expected, atol=2e-6, rtol=0)


@given(st.lists(st.tuples(st.sampled_from([-(2**63), -1, 0, 10**9, 2**63 - 1]), st.floats(-5, 5)), min_size=1))
def test_grpo_equals_a_plain_loop_for_any_groups_in_any_order(rows):
    group_ids, rewards = [g for g, _ in rows], [r for _, r in rows]
    expected = []
    for group_id, reward in rows:
        group = [r for g, r in rows if g == group_id]
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / max(len(group) - 1, 1))
        expected.append(0.0 if len(set(group)) == 1 else (reward - mean) / (std + 1e-6))
    assert estimate(rewards, group_ids).tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("size", [1, 3, 8, 30])
@pytest.mark.parametrize("reward", [0.1, 0.9, 1 / 3])
def test_a_group_of_equal_rewards_gets_exactly_zero(size, reward):
    assert estimate([reward] * size + [0.0, 1.0], [5] * size + [2, 2]).tolist()[:size] == [0.0] * size


def test_grpo_is_zero_off_the_mask():
    inputs = AdvantageInputs(
        torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([3, 3]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    )
    signs = GRPO()(inputs).sign().tolist()
    assert signs == [[1, 1, 0], [-1, 0, -1]]


def test_assign_gives_each_trained_token_the_advantage_of_its_sample():
    samples = [sample(1.0, 4, 3), sample(0.0, 9, 2), sample(0.0, 4, 1), sample(1.0, 9, 0)]
    assigned = assign(samples, GRPO())
    half = 1 / math.sqrt(2)
    expected = [[0, 0, half, half, half], [0, 0, -half, -half], [0, 0, -half], [0, 0]]
    for one, values in zip(assigned, expected, strict=True):
        assert one.advantages.dtype == torch.float32
        assert one.advantages.tolist() == pytest.approx(values, abs=1e-5)
    assert [one.group_id for one in assigned] == [4, 9, 4, 9]
    assert assign([], GRPO()) == []


def test_assign_puts_the_reward_on_the_last_trained_token():
    seen = []

    def spy(inputs):
        seen.append(inputs)
        return inputs.token_rewards

    assigned = assign([sample(0.5, 0, 3), sample(0.25, 0, 1)], as_estimator(spy))
    assert seen[0].token_rewards.tolist() == [[0, 0, 0.5], [0.25, 0, 0]]
    assert seen[0].rewards.tolist() == [0.5, 0.25]
    assert assigned[0].advantages.tolist() == [0, 0, 0, 0, 0.5]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_assign_refuses_a_reward_that_is_not_finite(reward):
    with pytest.raises(ValueError, match=r"sample 1 \(group 7\) has reward"):
        assign([sample(0.0, 7, 2), sample(reward, 7, 2)], GRPO())


def test_an_unknown_estimator_is_refused_with_the_names_there_are():
    assert advantages.get("grpo") is GRPO
    with pytest.raises(ValueError, match=r"'grppo'.*grpo.*did you mean 'grpo'"):
        advantages.get("grppo")
    with pytest.raises(ValueError, match="already registered"):
        advantages.register("grpo")(GRPO)
