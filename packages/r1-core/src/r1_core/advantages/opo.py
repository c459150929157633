"""OPO advantages: the minimum-variance baseline, a mean weighted by answer length.

A_i = r_i − Σ_j l_j r_j / Σ_j l_j over the group, with l the number of trained tokens; the same on every token.

arXiv 2505.23585 ("On-policy RL with optimal reward baseline"): assumes exact on-policy training, and that the squared
gradient norm of an answer grows with its length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics, row_sums


@dataclass(frozen=True, slots=True)
class OPO(Estimator):
    """No settings. Equal rewards and groups of one give exactly 0.

    Use it with one optimizer step a step, where answers to a prompt differ in length.

    Watch `actor/ppo_kl`, `response_length/mean` and `reward/groups_without_variance`.

    Fails off policy: with several optimizer steps a step, or stale samples, its baseline is no longer the one of least
    variance (arXiv 2505.23585 assumes exact on-policy training). With answers of equal length it is GRPO without std.
    """

    names = ("opo",)
    formula = r"A_i = r_i - \frac{\sum_j l_j r_j}{\sum_j l_j}"
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        lengths = row_sums(inputs.mask)
        _, index = torch.unique(inputs.group_ids, return_inverse=True)
        zeros = torch.zeros_like(rewards)
        # Measured from the group's mean, so that large rewards keep their digits.
        weighed = zeros.index_add(0, index, lengths * group.distance)
        baseline = (weighed / zeros.index_add(0, index, lengths).clamp(min=1))[index]
        return inputs.spread(group.distance - baseline)
