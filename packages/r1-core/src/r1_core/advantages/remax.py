"""ReMax advantages: each answer compared with the greedy answer to the same prompt.

A_t = Σ_(s ≥ t) r_s − b, with b the reward of the prompt's greedy answer.

arXiv 2310.10505 (ReMax). One extra generation per prompt replaces the critic. Needs `baselines` [N], the same number
for all samples of a prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import row_blocks, scan


@dataclass(frozen=True, slots=True)
class ReMax(Estimator):
    """No settings. Equal rewards give 0 only where the greedy answer earned the same.

    Use it where a prompt has one answer and there is no critic; each prompt gets an additional greedy answer, which is
    scored but not trained on.

    Watch `reward/overall`, `actor/entropy_loss` and `timing_s/gen`.

    Fails where the greedy answer is no typical one: if it is always right, right answers have advantage 0 and only
    mistakes teach; if it is always wrong, mistakes have 0. As entropy falls, sampled answers equal the greedy one and
    nothing is left.
    """

    names = ("remax",)
    formula = r"A_t = \sum_{s \ge t} r_s - r_{\text{greedy}}"
    needs = ("baselines",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        baselines = inputs.require("baselines", "ReMax").double()
        rewards, mask = inputs.shaped_rewards, inputs.mask
        advantages = torch.empty_like(rewards)
        for rows in row_blocks(mask.shape):
            returns = scan(rewards[rows], mask[rows], 1.0)
            advantages[rows] = torch.where(mask[rows], returns.sub_(baselines[rows, None]), 0.0)
        return advantages
