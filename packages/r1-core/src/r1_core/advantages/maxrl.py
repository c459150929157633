"""MaxRL advantages: the group's mean as baseline, and as divisor.

A = (r − mean of the group) / mean of the group, the same on every token of the answer.

arXiv 2602.02710 ("Maximum likelihood reinforcement learning"): dividing the policy gradient by the success rate gives a
truncated gradient of the log-likelihood of being right, so hard prompts weigh more. Assumes rewards that are not
negative; in the paper they are 1 for right and 0 for wrong.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics


@dataclass(frozen=True, slots=True)
class MaxRL(Estimator):
    """No settings. Equal rewards (also if none is right) and groups of one give exactly 0. A negative reward raises
    ValueError.

    Use it where prompts are hard and rewards are 1 or 0: the few right answers to a hard prompt weigh more.

    Watch `critic/advantages/max` and `actor/grad_norm`.

    Fails where a group's mean is tiny but not 0: one right answer of n has advantage n − 1, so a verifier's false
    positives on hard prompts dominate the gradient. A reward with a small part for the format is no success rate.
    """

    names = ("maxrl",)
    formula = r"A_i = \frac{r_i - \operatorname{mean}(r)}{\operatorname{mean}(r)}"
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards = inputs.rewards
        if (rewards < 0).any():
            row = int((rewards < 0).nonzero()[0])
            raise ValueError(
                f"sample {row} (group {int(inputs.group_ids[row])}) has reward {float(rewards[row])}; MaxRL divides "
                "by the mean reward, so give rewards from 0 up"
            )
        group = group_statistics(rewards, inputs.group_ids)
        return inputs.spread(group.distance / torch.where(group.constant, 1.0, group.mean))
