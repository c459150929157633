"""MaxRL advantages: group means as baseline, divided by the group's mean.

A = (r − mean of the group) / mean of the group, the same on every token of the answer.

arXiv 2602.02710 ("Maximum likelihood reinforcement learning"): dividing the policy gradient by the share of
successes turns it into a truncated gradient of the log-likelihood of being right, so that hard prompts count for more.
Assumes rewards that are not negative; in the paper they are 1 for right and 0 for wrong.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs, Estimator


@dataclass(frozen=True, slots=True)
class MaxRL(Estimator):
    """No settings. Equal rewards (none right among them) and groups of one give exactly 0.

    Use it where prompts are hard and rewards are 1 or 0: the few right answers to a hard prompt weigh more.
    """

    names = ("maxrl",)
    needs = ("groups",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards. Raises ValueError if a reward is negative."""
        rewards = inputs.rewards
        if (rewards < 0).any():
            row = int((rewards < 0).nonzero()[0])
            raise ValueError(
                f"sample {row} (group {int(inputs.group_ids[row])}) has reward {float(rewards[row])}; MaxRL divides "
                "by the mean reward, so give rewards from 0 up"
            )
        group = group_statistics(rewards, inputs.group_ids)
        return inputs.spread(group.distance / torch.where(group.constant, 1.0, group.mean))
