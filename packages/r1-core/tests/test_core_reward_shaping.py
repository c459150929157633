"""Rewards are normalised by fixed, batch or running moments, which are those of all rewards however they came."""

import math
import statistics

import pytest
import torch
from core_draws import few
from hypothesis import example, given
from hypothesis import strategies as st

from r1_core.reward_shaping import RewardNormalizer

rewards = st.lists(st.floats(-5, 5).map(lambda value: 1000 + value), min_size=2, max_size=12)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@given(values=rewards, cut=st.integers(0, 12))
@example(values=[1000.01, 999.99, 1000.0], cut=1)
@few
def test_running_moments_do_not_depend_on_how_the_rewards_were_cut(values, cut):
    running = RewardNormalizer().observe(tensor(values[:cut])).observe(tensor(values[cut:]))
    assert running.count == len(values)
    assert running.mean == pytest.approx(statistics.fmean(values), rel=1e-14)
    assert running.std == pytest.approx(statistics.stdev(values), rel=1e-8, abs=1e-9)


def test_a_batch_normalised_by_itself_has_mean_zero_and_spread_one():
    values = tensor([3.0, 1.0, 4.0, 1.5])
    normalised = RewardNormalizer.of(values)(values)
    assert float(normalised.mean()) == pytest.approx(0, abs=1e-15)
    assert float(normalised.std()) == pytest.approx(1)


def test_fixed_numbers_are_used_as_they_are():
    assert RewardNormalizer(0.5, 2.0, eps=0.0)(tensor([0.5, 4.5])).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("values", [[0.9] * 8, [0.3], []])
def test_equal_rewards_give_exactly_zero(values):
    assert (RewardNormalizer.of(tensor(values))(tensor(values)) == 0).all()


def test_what_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="reward 1 is nan"):
        RewardNormalizer().observe(tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="std is -1"):
        RewardNormalizer(std=-1.0)
