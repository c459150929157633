"""REINFORCE with a group baseline and a per-token KL penalty, in the order of OpenRLHF and LMM-R1.

A_t = whiten(clip(shaped score) − Σ_(s ≥ t) penalty_s), over all trained tokens of the batch. The steps:

1. shaped score of the answer: s − mean, or s − mean of the others, or (s − mean) / (std + eps), over the group;
2. clip it to `reward_clip`;
3. put it on the last trained token and subtract `token_penalties` from every token;
4. A_t = G_t = r_t + G_(t + 1), whitened over the batch if `whiten`; `norm_by_std=False` only subtracts the mean.

arXiv 2501.03262 (REINFORCE++) and arXiv 2402.14740 (RLOO). Unlike in `rloo` and `grpo`, the baseline uses scores only,
so a token's penalty affects that token and earlier ones, and no other answer.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator, check_reward_clip
from r1_core.advantages.rloo import leave_one_out
from r1_core.advantages.statistics import discounted_sums, group_statistics, row_sums, whiten, whiten_rows
from r1_core.settings import NonNegative, check_settings

Baseline = Literal["mean", "leave_one_out", "group_norm"]


@dataclass(frozen=True, slots=True)
class Reinforce(Estimator):
    """Constant groups and groups of one have the shaped score 0. With penalties, advantages are float64.

    Use it to reproduce runs of OpenRLHF and LMM-R1, and with the KL in the reward.

    Watch `critic/kl`, `critic/advantages/mean` and `reward/groups_without_variance`.

    Fails where most groups are constant: whitening subtracts the batch's mean from them, too, and scales the few that
    differ up. A `reward_clip` below the rewards' range makes right and wrong equal.
    """

    names = ("reinforce_baseline",)
    formula = (
        r"A_{it} = \operatorname{whiten}\Bigl(\operatorname{clip}(\tilde{r}_i) - \sum_{s \ge t} p_{is}\Bigr), \qquad "
        r"\tilde{r}_i = r_i - \operatorname{mean}(r)"
    )
    needs = ("groups",)

    baseline: Baseline = "mean"
    reward_clip: tuple[float, float] | None = None
    whiten: bool = True  # over the batch
    norm_by_std: bool = True
    eps: NonNegative = 1e-9

    def __post_init__(self) -> None:
        check_settings(self)
        check_reward_clip(self.reward_clip)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        mask = inputs.mask
        shaped = self._shape(inputs.scores, inputs.group_ids)
        if self.reward_clip is not None:
            shaped = shaped.clamp(*self.reward_clip)
        how = {"unbiased": False, "norm_by_std": self.norm_by_std}
        if inputs.token_penalties is None:
            return inputs.spread(whiten_rows(shaped, row_sums(mask), **how) if self.whiten else shaped)
        # Without discount, what a token still has to bear is a sum that no baseline enters.
        returns = shaped[:, None] - discounted_sums(inputs.token_penalties, mask, 1.0)
        return whiten(returns, mask, **how) if self.whiten else torch.where(mask, returns, 0.0)

    def _shape(self, scores: Tensor, group_ids: Tensor) -> Tensor:
        if self.baseline == "leave_one_out":
            return leave_one_out(scores, group_ids)
        group = group_statistics(scores, group_ids)
        return group.standardized(self.eps) if self.baseline == "group_norm" else group.distance
