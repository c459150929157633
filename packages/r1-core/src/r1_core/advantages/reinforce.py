"""REINFORCE with a group baseline under a per-token KL penalty, as OpenRLHF and LMM-R1 order the steps.

A_t = whiten(clip(shaped score) − Σ_(s ≥ t) penalty_s), over all trained tokens of the batch. The steps:

1. shaped score of the answer: s − mean, or s − mean of the others, or (s − mean) / (std + eps), over the group;
2. the shaped score is clipped to `reward_clip`;
3. it goes to the last trained token, and `token_penalties` are taken off every token;
4. A_t = G_t = r_t + G_(t + 1), whitened over the batch if `whiten`.

arXiv 2501.03262 (REINFORCE++) section 3 and arXiv 2402.14740 (RLOO). Unlike `rloo` and `grpo`, the baseline is taken
over scores alone, so that the penalty of a token reaches that token and those before it, and no other answer.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from r1_core.advantages.groups import group_statistics
from r1_core.advantages.inputs import AdvantageInputs
from r1_core.advantages.rloo import leave_one_out
from r1_core.advantages.scan import discounted_sums
from r1_core.advantages.whitening import whiten_

Baseline = Literal["mean", "leave_one_out", "group_norm"]


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Constant groups and groups of one have the shaped score 0. Raises ValueError on settings that mean nothing."""

    baseline: Baseline = "mean"
    reward_clip: tuple[float, float] | None = None
    whiten: bool = True
    eps: float = 1e-9

    def __post_init__(self) -> None:
        if self.baseline not in get_args(Baseline):
            raise ValueError(f"baseline is {self.baseline!r}; it must be one of {', '.join(get_args(Baseline))}")
        if self.reward_clip is not None and not self.reward_clip[0] <= self.reward_clip[1]:
            raise ValueError(f"reward_clip is {self.reward_clip}; the first number must not exceed the second")

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 advantages [N, R]."""
        mask = inputs.mask
        shaped = self._shape(inputs.scores, inputs.group_ids)
        if self.reward_clip is not None:
            shaped = shaped.clamp(*self.reward_clip)
        returns = torch.where(mask, shaped[:, None], 0.0)
        if inputs.token_penalties is not None:
            # Without discount, what a token still has to bear is a sum that no baseline enters.
            returns = torch.where(mask, returns - discounted_sums(inputs.token_penalties, mask, 1.0), 0.0)
        return whiten_(returns, mask, unbiased=False) if self.whiten else returns

    def _shape(self, scores: Tensor, group_ids: Tensor) -> Tensor:
        if self.baseline == "leave_one_out":
            return leave_one_out(scores, group_ids)
        group = group_statistics(scores, group_ids)
        shaped = torch.where(group.constant, 0.0, scores - group.mean)
        return shaped / (group.std + self.eps) if self.baseline == "group_norm" else shaped
