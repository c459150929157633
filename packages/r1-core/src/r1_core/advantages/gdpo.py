"""GDPO advantages: several rewards of an answer, each judged within its group before they are added up.

A = (S − mean S) / (std S + eps) over the batch, with S = Σ_k w_k · (r_k − group's mean) / (group's std + eps).

arXiv 2601.05242 ("Group reward-decoupled normalization policy optimization"): added up first, rewards of unlike scales
and combinations that say different things end up with the same advantage. Assumes `parts` [N, K], the K rewards of each
answer; the batch's mean and std are over answers. Penalties on tokens have no part to go to, so the KL belongs in the
loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs


@dataclass(frozen=True, slots=True)
class GDPO:
    """`weights` are the w_k, one for each part (None: all 1). Equal parts add exactly 0, and so does a group of one."""

    weights: tuple[float, ...] | None = None
    eps: float = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return advantages [N, R] in the dtype of the rewards.

        Raises ValueError without `parts`, with another number of weights, or with penalties on tokens.
        """
        parts = inputs.require("parts", "GDPO").double()
        weights = self.weights if self.weights is not None else (1.0,) * parts.shape[1]
        if len(weights) != parts.shape[1]:
            raise ValueError(f"weights has {len(weights)} numbers, but the answers have {parts.shape[1]} parts")
        if inputs.token_penalties is not None:
            raise ValueError("GDPO judges the parts of rewards and has no place for penalties; put the KL in the loss")
        total = torch.zeros(inputs.group_ids.shape, dtype=torch.float64, device=parts.device)
        for weight, part in zip(weights, parts.unbind(-1), strict=True):
            total = total + weight * group_statistics(part, inputs.group_ids).standardized(self.eps)
        batch = group_statistics(total, torch.zeros_like(inputs.group_ids))
        return inputs.spread(batch.standardized(self.eps))
