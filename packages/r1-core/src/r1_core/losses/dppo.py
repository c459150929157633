"""DPPO: a trust region of the policy's divergence at each token, in place of a clip of the ratio."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from r1_core.losses.policy import (
    PolicyLoss,
    check_not_negative,
    log_ratio,
    masked_advantages,
    masked_logprobs,
    token_gap,
)
from r1_core.types import LossInputs

Divergence = Literal["tv", "kl"]
# Keeps the logarithm of 1 − pi finite where pi is 1.
PROBABILITY_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class DPPO(PolicyLoss):
    """−sg(m·min(ratio, clip_dual))·A·log pi, m = 0 where pi left the region and the update leads further, else 1
    (arXiv 2602.04879).

    A token leaves it where the divergence of its own probability, pi_old against pi (all other tokens counted as one),
    exceeds clip_high on the way up, which A > 0 leads, or clip_low on the way down. `tv`: |pi − pi_old|; `kl`:
    pi_old·log(pi_old / pi) + (1 − pi_old)·log((1 − pi_old) / (1 − pi)). An unlikely token may so move by a large
    ratio, a likely one not. `clip_dual` bounds the importance weight, which carries no gradient (sg).
    """

    names = ("dppo",)
    token_wise = True

    divergence: Divergence = "tv"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 20.0

    def __post_init__(self) -> None:
        if self.divergence not in get_args(Divergence):
            raise ValueError(f"divergence is {self.divergence!r}; it must be one of {', '.join(get_args(Divergence))}")
        check_not_negative(clip_low=self.clip_low, clip_high=self.clip_high)
        if not self.clip_dual > 1:
            raise ValueError(f"clip_dual is {self.clip_dual}; it must be above 1")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics `ppo_kl`, `pg_clipfrac_higher` (tokens held) and `pg_clipfrac_lower`
        (of the others, those with a bounded weight)."""
        change, advantages = log_ratio(inputs).detach(), masked_advantages(inputs)
        moved = token_gap(inputs).detach()
        distance = self._distance(inputs)
        held = torch.where(
            advantages > 0, (moved > 0) & (distance > self.clip_high), (moved < 0) & (distance > self.clip_low)
        )
        ratio = change.exp()
        weight = torch.where(held, 0.0, ratio.clamp(max=self.clip_dual))
        metrics = {
            "ppo_kl": -change,
            "pg_clipfrac_higher": held.to(change.dtype),
            "pg_clipfrac_lower": (~held & (ratio > self.clip_dual)).to(change.dtype),
        }
        return -weight * advantages * masked_logprobs(inputs), metrics

    def _distance(self, inputs: LossInputs) -> Tensor:
        """The divergence of each token [B, R], 0 outside the mask."""
        mask = inputs.loss_mask
        new, old = (torch.where(mask, x.detach(), 0.0) for x in (inputs.logprobs, inputs.old_logprobs))
        probs, old_probs = new.exp(), old.exp()
        if self.divergence == "tv":
            return (probs - old_probs).abs()
        rest, old_rest = ((1 - p).clamp(min=PROBABILITY_FLOOR) for p in (probs, old_probs))
        return old_probs * (old - new) + old_rest * (old_rest / rest).log()
