"""GAE: a critic's forecast corrects the return at every token.

A_t = delta_t + gamma · lam · A_(t + 1) with delta_t = r_t + gamma · V_(t + 1) − V_t; returns = A + V; then whitening.

arXiv 1506.02438 (GAE) equations 11 to 16; whitening as PPO implementations do it. Assumes `values` [N, R], the
critic's forecast of the return before each token; past the last trained token the value is 0. Tokens of the
environment take no time: the next token is the next trained one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs
from r1_core.advantages.scan import discounted_sums, row_blocks
from r1_core.advantages.whitening import whiten_


@dataclass(frozen=True, slots=True)
class GAE:
    """`unbiased=False` whitens with the variance over n, as OpenRLHF and LMM-R1 do."""

    gamma: float = 1.0
    lam: float = 1.0
    unbiased: bool = True

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 advantages [N, R], whitened. Raises ValueError without `values`."""
        return whiten_(self._advantages(inputs), inputs.mask, unbiased=self.unbiased)

    def estimate(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return advantages before whitening and the returns that a critic learns, float64 [N, R], 0 off the mask."""
        mask = inputs.mask
        advantages = torch.where(mask, self._advantages(inputs), 0.0)
        return advantages, torch.where(mask, advantages + inputs.require("values", "GAE"), 0.0)

    def _advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Advantages before whitening; arbitrary off the mask."""
        decay = self.gamma * self.lam
        rewards, values, mask = inputs.shaped_rewards, inputs.require("values", "GAE"), inputs.mask
        advantages = torch.empty(mask.shape, dtype=torch.float64, device=mask.device)
        for rows in row_blocks(mask.shape):
            trained = mask[rows]
            block = discounted_sums(rewards[rows].double() - values[rows], trained, decay)
            # Σ decay^k · V_(t + 1 + k) is the scan of the values one column on, holes being passed over.
            block[:, :-1].add_(discounted_sums(values[rows], trained, decay)[:, 1:], alpha=self.gamma)
            advantages[rows] = block
        return advantages
