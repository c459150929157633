"""GRPO advantages: each answer compared with the other answers to the same prompt.

A = (r − mean of the group) / (std of the group + eps), the same on every token of the answer.

arXiv 2402.03300 (DeepSeekMath), outcome supervision. Assumes one reward per answer and at least two answers per prompt.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class GRPO(Estimator):
    """The std is unbiased (n − 1); `norm_by_std=False` omits the division.

    Groups of equal rewards and groups of one get exactly 0.

    Use it first: it needs several answers to a prompt and nothing else.

    Watch `reward/groups_without_variance`, `actor/entropy_loss` and `response_length/mean`.

    Fails where most groups are all right or all wrong: they have no gradient, and their share grows as the model learns
    (arXiv 2503.14476). Dividing by the std gives prompts of little spread more weight, and a mean over each answer's
    own tokens makes wrong answers longer (arXiv 2503.20783): `dr_grpo` has neither.
    """

    names = ("grpo",)
    formula = r"A_i = \frac{r_i - \operatorname{mean}(r)}{\operatorname{std}(r) + \epsilon}"
    needs = ("groups",)

    norm_by_std: bool = True
    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        group = group_statistics(inputs.rewards, inputs.group_ids)
        return inputs.spread(group.standardized(self.eps) if self.norm_by_std else group.distance)
