"""Statistics of samples that share a prompt, for groups of any size in any order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.types import check_tensors


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The statistics of each sample's group; every tensor is [N]."""

    mean: Tensor  # float64
    distance: Tensor  # float64, of each reward from the mean; exactly 0 where all rewards of the group are equal
    std: Tensor  # float64, divided by size - 1; 0 for a group of one
    size: Tensor  # int64
    constant: Tensor  # bool, true where all rewards of the group are the same number

    def standardized(self, eps: float) -> Tensor:
        """Return distance / (std + eps), float64 [N]; exactly 0 in a constant group, even if eps is 0."""
        return torch.where(self.constant, 0.0, self.distance / (self.std + eps))


def check_group(rewards: Tensor, group_ids: Tensor) -> None:
    check_tensors("rewards of groups", "[N]", rewards=rewards)
    check_tensors("rewards of groups", "[N]", rewards.shape, group_ids=group_ids)


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Compute mean and unbiased std of each group's rewards [N], repeated for its samples.

    Uses float64 and two passes: in one pass, rewards like 1000 ± 0.01 lose their variance to cancellation. The mean is
    relative to the group's lowest reward, so that equal rewards give exactly 0.
    """
    check_group(rewards, group_ids)
    rewards = rewards.double()
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(sizes.shape[0])
    low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    above = rewards - low[index]
    offset = zeros.index_add(0, index, above) / sizes
    distance = above - offset[index]
    std = (zeros.index_add(0, index, distance.square()) / (sizes - 1).clamp(min=1)).sqrt()
    high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return GroupStatistics((low + offset)[index], distance, std[index], sizes[index], (low == high)[index])
