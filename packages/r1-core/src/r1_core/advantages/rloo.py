"""RLOO advantages: each answer compared with the mean of the others.

A_i = r_i − mean of r_j over j ≠ i = (r_i − mean) · n / (n − 1), the same on every token of the answer.

arXiv 2402.14740 ("Back to basics"). The baseline excludes the answer itself, so the gradient is unbiased. Assumes one
reward per answer and at least two answers per prompt.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics


@dataclass(frozen=True, slots=True)
class RLOO(Estimator):
    """No settings. Equal rewards and groups of one give exactly 0.

    Use it for an unbiased gradient with advantages on the scale of the rewards.

    Watch `reward/groups_without_variance`, `critic/advantages/max` and `actor/grad_norm`.

    Fails with few answers a prompt: of two, each one's baseline is the other's reward alone. Advantages keep the scale
    of the rewards, so a rate that suits rewards of 0 and 1 does not suit rewards of 0 to 100.
    """

    names = ("rloo",)
    formula = r"A_i = r_i - \frac{1}{n - 1} \sum_{j \ne i} r_j"
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.spread(leave_one_out(inputs.rewards, inputs.group_ids))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return each reward minus the mean of the others in its group, float64 [N]."""
    group = group_statistics(rewards, group_ids)
    return group.distance * group.size / (group.size - 1).clamp(min=1)
