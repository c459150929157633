"""GRPO advantages: each answer against the other answers to the same prompt.

A = (r − mean of the group) / (std of the group + eps), the same on every token of the answer.

arXiv 2402.03300 (DeepSeekMath), outcome supervision. Assumes one reward per answer and at least two
answers per prompt.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class GRPO(Estimator):
    """The std is the unbiased one (n − 1); `norm_by_std=False` leaves the division out.

    A group whose rewards are all equal says nothing about which answer is better and gets exactly 0; so does a group
    of one.

    Use it first: it needs several answers to a prompt and nothing else.
    """

    names = ("grpo",)
    needs = ("groups",)

    norm_by_std: bool = True
    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards."""
        group = group_statistics(inputs.rewards, inputs.group_ids)
        return inputs.spread(group.standardized(self.eps) if self.norm_by_std else group.distance)
