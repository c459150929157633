"""DPPO: a trust region on the policy's divergence at each token, instead of a clip of the ratio.

−sg(m·min(ratio, clip_dual))·A·log pi, m = 0 where pi left the region and the update leads further, else 1
(arXiv 2602.04879).

A token leaves the region where the divergence of its own probability, pi_old against pi (all other tokens counted as
one), exceeds clip_high while A > 0 raises it, or clip_low while A < 0 lowers it: |pi − pi_old| (TV), or
pi_old·log(pi_old / pi) + (1 − pi_old)·log((1 − pi_old) / (1 − pi)) (KL). So an unlikely token may change by a large
ratio and a likely one may not. `clip_dual` bounds the importance weight, which carries no gradient (sg). The default
widths are those of the authors' script: 0.15 for TV, 0.05 for KL.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import PolicyLoss, log_ratio, masked_advantages, masked_logprobs, token_gap
from r1_core.settings import DualClip, NonNegative
from r1_core.types import LossInputs

# Keeps the logarithm of 1 − pi finite where pi is 1.
PROBABILITY_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class DPPOTV(PolicyLoss):
    """−sg(m·min(ratio, clip_dual))·A·log pi, m = 0 where |pi − pi_old| is too large and would grow, else 1.

    Use it with several optimizer steps a step, where a ratio clip is too tight for unlikely tokens and too loose for
    likely ones.

    Watch `actor/pg_clipfrac_higher`, `actor/ppo_kl` and `actor/entropy_loss`.

    Fails as a brake on unlikely tokens: one of probability 0.001 may grow a hundredfold inside a width of 0.15. Only
    `clip_dual` bounds its weight.
    """

    names = ("dppo_tv",)
    formula = (
        r"-\operatorname{sg}\bigl(m_t \min(\rho_t, c_{\text{dual}})\bigr) A_t \log \pi_t, \qquad "
        r"m_t = 0 \text{ where } \lvert \pi_t - \pi_t^{\text{old}} \rvert > c \text{ and would grow, else } 1"
    )
    token_wise = True

    clip_low: NonNegative = 0.15
    clip_high: NonNegative = 0.15
    clip_dual: DualClip = 20.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        new, old = _logprobs(inputs)
        distance = (new.exp() - old.exp()).abs()
        return held_gradient(inputs, distance, self.clip_low, self.clip_high, self.clip_dual)


@dataclass(frozen=True, slots=True)
class DPPOKL(PolicyLoss):
    """−sg(m·min(ratio, clip_dual))·A·log pi, m = 0 where KL(pi_old, pi) is too large and would grow, else 1.

    Use it like `dppo_tv`, with the KL as the divergence.

    Watch `actor/pg_clipfrac_higher`, `actor/ppo_kl` and `actor/entropy_loss`.

    Fails where the width is taken from `dppo_tv`: a KL of 0.15 lets a probability change
    by up to 0.27.
    """

    names = ("dppo_kl",)
    formula = (
        r"-\operatorname{sg}\bigl(m_t \min(\rho_t, c_{\text{dual}})\bigr) A_t \log \pi_t, \qquad "
        r"m_t = 0 \text{ where } \operatorname{KL}(\pi_t^{\text{old}}, \pi_t) > c \text{ and would grow, else } 1"
    )
    token_wise = True

    clip_low: NonNegative = 0.05
    clip_high: NonNegative = 0.05
    clip_dual: DualClip = 20.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        new, old = _logprobs(inputs)
        rest, old_rest = ((1 - x.exp()).clamp(min=PROBABILITY_FLOOR) for x in (new, old))
        distance = old.exp() * (old - new) + old_rest * (old_rest / rest).log()
        return held_gradient(inputs, distance, self.clip_low, self.clip_high, self.clip_dual)


def held_gradient(
    inputs: LossInputs, distance: Tensor, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient without the tokens that left the trust region, given each token's `distance` [B, R] from pi_old.

    Returns losses [B, R] and the metrics `ppo_kl`, `pg_clipfrac_higher` (tokens masked) and `pg_clipfrac_lower` (of the
    others, those with a bounded weight).
    """
    change, advantages = log_ratio(inputs).detach(), masked_advantages(inputs)
    moved = token_gap(inputs).detach()
    held = torch.where(advantages > 0, (moved > 0) & (distance > clip_high), (moved < 0) & (distance > clip_low))
    ratio = change.exp()
    weight = torch.where(held, 0.0, ratio.clamp(max=clip_dual))
    metrics = {
        "ppo_kl": -change,
        "pg_clipfrac_higher": held.to(change.dtype),
        "pg_clipfrac_lower": (~held & (ratio > clip_dual)).to(change.dtype),
    }
    return -weight * advantages * masked_logprobs(inputs), metrics


def _logprobs(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    new, old = (torch.where(inputs.loss_mask, x.detach(), 0.0) for x in (inputs.logprobs, inputs.old_logprobs))
    return new, old
