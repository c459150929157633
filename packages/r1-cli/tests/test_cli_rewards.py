"""Rewards are punished, scaled and clipped in this order, the baseline with them, and filters see what they should."""

from dataclasses import replace

import pytest
from cli_groups import change, group

from r1_cli.train.groups.advantages import OverlongBuffer, Shaping
from r1_cli.train.groups.group import by_sample, filter_values, passes
from r1_core.filtering import KeepAll, MeanRange, NonzeroVariance
from r1_core.reward_shaping import RewardNormalizer
from r1_rewards.types import Score

BUFFER = OverlongBuffer(max_length=4, buffer=2, factor=0.5)


def test_answers_near_the_limit_cost_what_dapo_says() -> None:
    answers = group(["a", "b", "c", "d"], [1.0] * 4)  # one to four tokens long
    assert BUFFER.penalize(answers).rewards == [1.0, 1.0, 0.75, 0.5]
    assert [score.value for score in BUFFER.penalize(answers).scores] == [1.0] * 4
    assert BUFFER.metrics([answers]) == {"overlong/penalty": -0.1875, "overlong/ratio": 0.5}


def test_rewards_are_scaled_by_all_so_far_and_then_clipped() -> None:
    answers = replace(group(["a", "b"], [0.0, 4.0]), baseline=2.0)
    (shaped,), statistics = Shaping(normalize=True, clip=(-0.5, 2.0)).apply([answers], RewardNormalizer())
    assert shaped.rewards == pytest.approx([-0.5, 0.5**0.5])
    assert shaped.baseline == pytest.approx(0.0)
    (later,), _ = Shaping(normalize=True).apply([group(["a"], [2.0])], statistics)
    assert later.rewards == pytest.approx([0.0])


def test_without_shaping_rewards_are_scores_and_nothing_is_remembered() -> None:
    answers = group(["a", "b"], [0.0, 1.0])
    assert Shaping().penalize(answers) is answers
    assert Shaping().apply([answers], RewardNormalizer()) == ([answers], RewardNormalizer())


def test_filters_look_at_the_reward_or_at_a_part_of_the_score() -> None:
    punished = BUFFER.penalize(group(["a", "b", "c", "d"], [1.0] * 4))
    assert filter_values([punished], "overall") == [[1.0, 1.0, 0.75, 0.5]]
    assert filter_values([punished], "accuracy") == [[1.0] * 4]
    failed = change(punished, 0, score=Score(0.0))
    assert filter_values([failed], "accuracy") == [[punished.rewards[0], 1.0, 1.0, 1.0]]


def test_groups_pass_whole() -> None:
    values = [[0.0, 1.0], [1.0, 1.0, 1.0], [0.5]]
    assert passes(MeanRange(), values) == [True, False, True]
    assert passes(NonzeroVariance(), values) == [True, False, False]
    assert passes(KeepAll(), values) == [True] * 3
    rewards, group_ids = by_sample(values)
    assert rewards.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    assert group_ids.tolist() == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("group_filter", [KeepAll(), MeanRange(), NonzeroVariance()])
def test_no_groups_are_none(group_filter: KeepAll | MeanRange | NonzeroVariance) -> None:
    assert filter_values([], "accuracy") == []
    assert passes(group_filter, []) == []
