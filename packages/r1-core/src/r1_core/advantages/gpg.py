"""GPG advantages: group means as baseline, scaled up for the answers that teach nothing.

A = alpha · (r − mean of the group) / f_norm with alpha = N / M, the same on every token of the answer.

arXiv 2504.02546 ("GPG: a simple and strong RL baseline"). There M counts the samples of groups whose
rewards differ, so that groups without a gradient do not shrink the batch's. Assumes one reward per answer.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.settings import Positive

Counted = Literal["informative", "nonzero"]


@dataclass(frozen=True, slots=True)
class GPG(Estimator):
    """`counted` says what M is: the paper's samples of informative groups, or all with a reward other than 0 (veRL).

    Equal rewards and groups of one give exactly 0. Raises ValueError on an unknown `counted` or an `f_norm` of 0.

    Use it with the loss `gpg` where many groups of a batch teach nothing and the plain policy gradient is wanted.
    """

    names = ("gpg",)
    needs = ("groups",)

    f_norm: Positive = 1.0
    counted: Counted = "informative"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards."""
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        teaching = ~group.constant if self.counted == "informative" else rewards != 0
        alpha = rewards.shape[0] / teaching.sum().clamp(min=1).double()  # of integers it would be float32
        return inputs.spread(alpha * group.distance / self.f_norm)
