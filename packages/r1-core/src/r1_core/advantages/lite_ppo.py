"""Lite PPO advantages: the group gives the location, the rewards of the whole batch the scale.

A = (r − mean of the group) / (std of the batch's rewards + eps), the same on every token of the answer.

arXiv 2508.08221 ("Tricks or traps?"): where the rewards of a group hardly differ, its own std would blow them up.
Assumes one reward per answer; goes with an average over tokens. Unlike `reinforce_plus_plus_baseline`, the std is that
of the rewards, not of what the baseline leaves of them, and answers count once, however long.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class LitePPO(Estimator):
    """The std is the unbiased one (n − 1). Equal rewards in a group and groups of one give exactly 0.

    Use it where rewards hardly differ within groups, so that a group's own std would make much of little.
    """

    names = ("lite_ppo",)
    needs = ("groups",)

    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards."""
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        batch = group_statistics(rewards, torch.zeros_like(inputs.group_ids))
        return inputs.spread(torch.where(group.constant, 0.0, group.distance / (batch.std + self.eps)))
