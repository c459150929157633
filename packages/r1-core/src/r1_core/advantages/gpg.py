"""GPG advantages: group mean as baseline, rescaled by the share of samples that carry a gradient.

A = alpha · (r − mean of the group) / f_norm with alpha = N / M, the same on every token of the answer.

arXiv 2504.02546 ("GPG: a simple and strong RL baseline"). M counts the samples of groups whose rewards differ, so that
groups without a gradient do not shrink the batch's gradient. Assumes one reward per answer.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics
from r1_core.settings import Positive

Counted = Literal["informative", "nonzero"]


@dataclass(frozen=True, slots=True)
class GPG(Estimator):
    """`counted` defines M: samples of groups with a gradient (the paper), or all with a nonzero reward (veRL).

    Equal rewards and groups of one give exactly 0.

    Use it with the loss `gpg` where many groups carry no gradient and you want the plain policy gradient.

    Watch `reward/groups_without_variance` and `actor/grad_norm`.

    Fails where hardly a group has a gradient: alpha is N / M, so the few samples left are scaled up, noise included.
    Filter such groups (`algorithm.online_filtering`) before you trust the scale.
    """

    names = ("gpg",)
    formula = r"A_i = \alpha \frac{r_i - \operatorname{mean}(r)}{f_{\text{norm}}}, \qquad \alpha = \frac{N}{M}"
    needs = ("groups",)

    f_norm: Positive = 1.0
    counted: Counted = "informative"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.rewards
        group = group_statistics(rewards, inputs.group_ids)
        teaching = ~group.constant if self.counted == "informative" else rewards != 0
        alpha = rewards.shape[0] / teaching.sum().clamp(min=1).double()  # of integers it would be float32
        return inputs.spread(alpha * group.distance / self.f_norm)
