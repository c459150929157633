"""Dr.GRPO advantages: GRPO without the division by the group's standard deviation.

A = r − mean of the group, the same on every token of the answer.

arXiv 2503.20783 ("Understanding R1-Zero-like training"): dividing by the std gives more weight to questions that are
nearly always or never solved. Goes with an aggregation that divides by a fixed length.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics


@dataclass(frozen=True, slots=True)
class DrGRPO(Estimator):
    """No settings. Equal rewards and groups of one give exactly 0.

    Use it where prompts that are nearly always or never solved shall not weigh more than others, with
    `worker.actor.loss_avg_mode=seq-mean-token-sum-norm`.

    Watch `reward/groups_without_variance`, `critic/advantages/max` and `actor/grad_norm`.

    Fails where sources have rewards of different scales, or rewards are small beside a KL or an entropy term, because
    advantages keep the rewards' scale. With another `loss_avg_mode`, the length of an answer changes its weight again
    (arXiv 2503.20783).
    """

    names = ("dr_grpo",)
    formula = r"A_i = r_i - \operatorname{mean}(r)"
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.spread(group_statistics(inputs.rewards, inputs.group_ids).distance)
