"""GDPO: parts are judged one by one, added up, and measured against the batch."""

from dataclasses import replace

import pytest
import torch
from core_draws import advantage_inputs, enlarge, few, take
from hypothesis import given
from hypothesis import strategies as st

from r1_core.advantages import GDPO, GRPO, AdvantageInputs, assign
from r1_core.types import Sample

seeds = st.integers(0, 10**6)
close = torch.testing.assert_close


def of_parts(parts, groups, **settings):
    parts = torch.tensor(parts, dtype=torch.float64)
    mask = torch.ones(len(parts), 1, dtype=torch.bool)
    inputs = AdvantageInputs(parts.sum(-1, keepdim=True), torch.tensor(groups), mask, parts=parts)
    return GDPO(**settings)(inputs)[:, 0]


def test_combinations_that_add_up_to_the_same_reward_stay_apart():
    # Right but badly formatted, or wrong but well formatted: 1 in all. The format is rarely wrong, so it tells more.
    parts = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]]
    advantages = of_parts(parts, [0] * 4).tolist()
    assert advantages[0] != advantages[1] == advantages[2]
    assert max(advantages) == advantages[3]


def test_it_equals_the_formula_by_hand():
    first, second = 2**-0.5, -(2**-0.5)  # of two unlike rewards, whatever they are
    sums = torch.tensor([first + 3 * first, second + 3 * second, first, second], dtype=torch.float64)
    expected = (sums - sums.mean()) / sums.std()
    got = of_parts([[1, 50], [0, 10], [7, 5], [3, 5]], [4, 4, 9, 9], reward_weights=(1.0, 3.0), eps=0.0)
    close(got, expected)


@given(seed=seeds, columns=st.integers(1, 3))
@few
def test_order_names_of_groups_and_padding_do_not_matter(seed, columns):
    inputs = advantage_inputs(seed)
    order = torch.randperm(len(inputs.group_ids), generator=torch.Generator().manual_seed(seed))
    moved = take(inputs, order)
    close(GDPO()(replace(moved, group_ids=moved.group_ids * -3 + 17)), GDPO()(inputs)[order])
    close(GDPO()(enlarge(inputs, columns=columns))[:, :-columns], GDPO()(inputs))


@pytest.mark.parametrize("size", [0, 1, 8])
def test_equal_parts_groups_of_one_and_empty_batches_give_exactly_zero(size):
    equal = torch.full((size,), 0.9, dtype=torch.float64)
    for groups in (torch.zeros(size, dtype=torch.int64), torch.arange(size)):
        inputs = advantage_inputs(2, equal, groups)
        assert (GDPO(eps=0.0)(replace(inputs, parts=torch.stack([equal, 2 * equal], -1))) == 0).all()


def test_what_is_missing_or_does_not_fit_is_named():
    inputs = advantage_inputs(5)
    with pytest.raises(ValueError, match="GDPO needs `parts`"):
        GDPO()(replace(inputs, parts=None))
    with pytest.raises(ValueError, match="reward_weights has 3 numbers, but the answers have 2 parts"):
        GDPO(reward_weights=(1.0, 1.0, 1.0))(inputs)
    with pytest.raises(ValueError, match="put the KL in the loss"):
        GDPO()(replace(inputs, token_penalties=torch.zeros(inputs.mask.shape)))


def test_assign_hands_the_parts_over():
    tokens = torch.arange(3)
    samples = [Sample(tokens, tokens > 0, tokens[None], 0, reward) for reward in (1.0, 1.0, 2.0)]
    parts = [{"right": a, "form": b, "overall": 9.0} for a, b in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))]
    apart = assign(samples, GDPO(("right", "form"), (1.0, 2.0)), parts=parts)
    assert len({float(sample.advantages[1]) for sample in apart}) == 3
    absent = assign(samples, GDPO(("missing",)), parts=parts)
    assert absent[0].advantages[1] == absent[1].advantages[1] < absent[2].advantages[1]
    together = assign(samples, GRPO())
    assert together[0].advantages[1] == together[1].advantages[1]
