"""Pass@k advantages: only the best answer to a prompt gets one, its lead over the second best.

A = (r_max − r_second) / (std of the group + eps) for the best answer, 0 for all others.

arXiv 2503.19595 ("Optimizing language models for inference time objectives using RL"): an unbiased, leave-one-out
gradient of the expected maximum over the k answers of a group. Assumes one reward per answer; k is the group's size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class GRPOPassK(Estimator):
    """`norm_by_std=False` omits the division, as in the paper. A tie for the best and a group of one give 0.

    Use it to optimize pass@k, where one right answer of k counts, instead of the average answer.

    Watch `reward/groups_without_variance`, `critic/advantages/max` and `val/avg@K`.

    Fails where two answers of a group tie for the best, as with rewards of 0 and 1 and two right answers: the group
    then teaches nothing. In the quickstart, where half of the answers are right at first, it stopped at 0.67 (GRPO:
    0.88, same seed).
    """

    names = ("grpo_passk",)
    formula = (
        r"A_i = \begin{cases} \frac{r_{\max} - r_{\text{second}}}{\operatorname{std}(r) + \epsilon} & "
        r"i = \operatorname{argmax}(r) \\ 0 & \text{else} \end{cases}"
    )
    needs = ("groups",)

    norm_by_std: bool = True
    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        _, index = torch.unique(inputs.group_ids, return_inverse=True)
        lowest = rewards.new_full((index.shape[0],), -torch.inf)
        best = lowest.scatter_reduce(0, index, rewards, "amax")[index]
        leads = rewards == best
        second = lowest.scatter_reduce(0, index, torch.where(leads, -torch.inf, rewards), "amax")[index]
        leaders = torch.zeros_like(rewards).index_add(0, index, leads.double())[index]
        scale = group.std + self.eps if self.norm_by_std else 1.0
        return inputs.spread(torch.where(leads & (leaders == 1) & (group.size > 1), (best - second) / scale, 0.0))
