"""Lite PPO advantages: centered by the group's mean, scaled by the batch's standard deviation.

A = (r − mean of the group) / (std of the batch's rewards + eps), the same on every token of the answer.

arXiv 2508.08221 ("Tricks or traps?"): dividing by a group's own small std would inflate small differences. Assumes one
reward per answer; aggregate over tokens. Unlike `reinforce_plus_plus_baseline`, the std is that of the raw rewards, and
every answer counts once, whatever its length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class LitePPO(Estimator):
    """The std is unbiased (n − 1). Equal rewards in a group and groups of one give exactly 0.

    Use it where rewards hardly differ within groups, so that dividing by a group's own std would inflate noise.

    Watch `critic/advantages/max`, `reward/groups_without_variance` and `actor/entropy_loss`.

    Fails where a batch mixes sources of different reward scales: one std for all leaves the small ones without weight.
    In a batch of few prompts the std itself is noise.
    """

    names = ("lite_ppo",)
    formula = r"A_i = \frac{r_i - \operatorname{mean}(r)}{\operatorname{std}_{\text{batch}}(r) + \epsilon}"
    needs = ("groups",)

    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        batch = group_statistics(rewards, torch.zeros_like(inputs.group_ids))
        return inputs.spread(torch.where(group.constant, 0.0, group.distance / (batch.std + self.eps)))
