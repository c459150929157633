"""Where groups meet the filter of dynamic sampling, which knows numbers only."""

from collections.abc import Sequence

import torch

from r1_cli.groups.group import Group
from r1_core.filtering import GroupFilter


def filter_values(groups: Sequence[Group], key: str) -> list[list[float]]:
    """Return what the filter looks at, of each answer of each group: the reward, or the part `key` of the scores.

    The reward stands for a part that an answer lacks, as one does that could not be scored.
    """
    if key == "overall":
        return [group.rewards for group in groups]
    return [
        [score.parts.get(key, reward) for score, reward in zip(group.scores, group.rewards, strict=True)]
        for group in groups
    ]


def passes(group_filter: GroupFilter, values: Sequence[Sequence[float]]) -> list[bool]:
    """Return which groups the filter keeps; it says so of each sample, and the same of all of a group."""
    kept = group_filter.keep(*by_sample(values)).split([len(group) for group in values])
    return [bool(samples.any()) for samples in kept]


def by_sample(values: Sequence[Sequence[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of all groups and the group each belongs to: float64 [N] and int64 [N]."""
    lengths = torch.tensor([len(group) for group in values], dtype=torch.int64)
    flat = torch.tensor([value for group in values for value in group], dtype=torch.float64)
    return flat, torch.arange(len(values)).repeat_interleave(lengths)
