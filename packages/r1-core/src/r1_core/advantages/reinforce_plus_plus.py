"""REINFORCE++ advantages: discounted returns, whitened over the whole batch.

A_t = (G_t − mean) / sqrt(variance + eps) with G_t = r_t + gamma · G_(t + 1), over all trained tokens of the batch.

arXiv 2501.03262 (REINFORCE++) section 3, where rewards carry the KL term (`token_penalties`). No groups are needed.
Tokens of the environment take no time: earlier turns are credited with what came after them.
"""

from dataclasses import dataclass

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs
from r1_core.advantages.scan import discounted_sums
from r1_core.advantages.whitening import whiten_


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """`unbiased=False` whitens with the variance over n, as OpenRLHF and LMM-R1 do. Equal returns give exactly 0."""

    gamma: float = 1.0
    unbiased: bool = True

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 advantages [N, R]."""
        returns = discounted_sums(inputs.shaped_rewards, inputs.mask, self.gamma)
        return whiten_(returns, inputs.mask, unbiased=self.unbiased)
