"""Optimal token baseline: at each token, the minimum-variance baseline over the group.

A_it = G_it − Σ_j W_jt G_jt / Σ_j W_jt over the group.

G is the return, W_it = Σ_(s ≤ t) w_is estimates the squared norm of the gradient so far, and
w = 1 − 2 π(token) + Σ_vocabulary π², times the squared correction weight.

arXiv 2602.07078 ("Optimal token baseline"). w is |onehot − π|², the squared norm of the gradient of log π in the
logits. Needs `old_logprobs` and `squared_probs`, and uses `correction_weights` if given.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import discounted_sums
from r1_core.settings import Positive


@dataclass(frozen=True, slots=True)
class OptimalTokenBaseline(Estimator):
    """Compares tokens of the same rank among their answers' trained tokens. Advantages are float64.

    `by_column` compares by column instead, counting observation tokens. `free_tail`: where only one answer of a group
    continues, its baseline is 0 instead of its own return. A group of one has advantage 0 unless `free_tail`.

    Use it where answers are long and gradient variance is the problem; it needs an extra forward pass.

    Watch `timing_s/old`, `actor/grad_norm` and `critic/advantages/max`.

    Fails where answers of a group differ much in length: past the second longest, one answer stands alone, and its
    baseline is its own return unless `free_tail`. Tokens of equal rank are compared although they may say different
    things.
    """

    names = ("optimal_token_baseline",)
    formula = (
        r"A_{it} = G_{it} - \frac{\sum_j W_{jt} G_{jt}}{\sum_j W_{jt}}, \qquad "
        r"W_{it} = \sum_{s \le t} w_{is}, \qquad w = 1 - 2 \pi(\text{token}) + \sum_v \pi(v)^2"
    )
    needs = ("groups", "old_logprobs", "squared_probs", "correction_weights")

    free_tail: bool = False  # no baseline where one answer alone goes on
    by_column: bool = False  # compare by column, observations counted
    eps: Positive = 1e-8

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = inputs.mask
        if not mask.numel():
            return torch.zeros(mask.shape, dtype=torch.float64)
        returns = discounted_sums(inputs.shaped_rewards, mask, 1.0)
        weights = torch.where(mask, self._weights(inputs), 0.0).cumsum(-1)
        groups, index = torch.unique(inputs.group_ids, return_inverse=True)
        width = mask.shape[1]
        ranks = torch.arange(width).expand(mask.shape) if self.by_column else mask.cumsum(-1) - 1
        cells = (index[:, None] * width + ranks)[mask]
        zeros = returns.new_zeros(groups.shape[0] * width)
        weights, trained = weights[mask], returns[mask]
        # Measured from the lowest of the cell, so that equal returns give exactly 0.
        lowest = zeros.scatter_reduce(0, cells, trained, "amin", include_self=False)[cells]
        distances = trained - lowest
        total = zeros.index_add(0, cells, weights) + self.eps
        advantages = distances - (zeros.index_add(0, cells, weights * distances) / total)[cells]
        if self.free_tail:
            alone = zeros.index_add(0, cells, torch.ones_like(trained))[cells] == 1
            advantages = torch.where(alone, trained, advantages)
        return torch.zeros_like(returns).masked_scatter(mask, advantages)

    def _weights(self, inputs: AdvantageInputs) -> Tensor:
        probs = inputs.require("old_logprobs", "the optimal token baseline").double().exp()
        weights = 1 - 2 * probs + inputs.require("squared_probs", "the optimal token baseline").double()
        correction = inputs.correction_weights
        return weights if correction is None else weights * correction.double().square()
