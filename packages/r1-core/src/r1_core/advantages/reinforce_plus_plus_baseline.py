"""REINFORCE++ with a group baseline: rewards minus their group's mean, whitened over the whole batch.

A = whiten(r − mean of the group), over all trained tokens of the batch.

arXiv 2501.03262 (REINFORCE++), "REINFORCE++ with baseline": scaling by the batch avoids inflating groups of small
spread. A constant group enters the whitening as 0; the batch's token mean, not 0 if lengths differ, is then subtracted
from it, too.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics, row_sums, whiten_rows


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(Estimator):
    """No settings. A batch of constant groups gives exactly 0.

    Use it where groups of nearly equal rewards shall weigh less than others.

    Watch `critic/advantages/mean`, `reward/groups_without_variance` and `response_length/mean`.

    Fails where few groups differ: the batch's std is then small, and the few are scaled up. Answers of different length
    shift the token mean, so that constant groups get an advantage that is not 0.
    """

    names = ("reinforce_plus_plus_baseline",)
    formula = r"A_i = \operatorname{whiten}_{\text{batch}}\bigl(r_i - \operatorname{mean}(r)\bigr)"
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        distances = group_statistics(inputs.rewards, inputs.group_ids).distance
        return inputs.spread(whiten_rows(distances, row_sums(inputs.mask)))
