"""Clip-Cov and KL-Cov: restrain the few tokens whose covariance of advantage and log-prob lowers the entropy most.

arXiv 2505.22617 (The Entropy Mechanism): cov_t = (A_t − mean A)·(log pi_t − mean log pi), means over the batch.
Clip-Cov removes a few random tokens of high covariance from the gradient; KL-Cov adds coef·|log(pi / pi_old)| to those
of the highest.

Tokens are chosen among all trained tokens of the optimizer step, before micro-batching, by the log-probs before the
step (`Objective.prepare`); without that, among the tokens of the call by their current log-probs.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import (
    PolicyLoss,
    SelectingLoss,
    clipped_surrogate,
    log_ratio,
    masked_advantages,
)
from r1_core.settings import ClipWidth, NonNegative, Share
from r1_core.types import LossInputs, check_tensors


@dataclass(frozen=True, slots=True)
class ClipCov(PolicyLoss):
    """PPO's clipped loss, but 0 on `ratio`·N tokens drawn at random from those with cov_low < cov_t < cov_high.

    The random choice is seeded by the number of tokens, so every rank and a resumed run make the same one. The metric
    `cov_frac` counts the removed tokens.

    Use it where entropy falls early (`actor/entropy_loss`) and a wider upper clip does not stop it.

    Watch `actor/cov_frac`, `actor/entropy_loss` and `actor/pg_clipfrac_higher`.

    Fails in small batches: 0.0002 of fewer than 10,000 tokens is one token, and the loss is nearly PPO's. With many
    optimizer steps a step its authors saw entropy collapse or surge, and advise fewer steps or a larger share
    (github.com/PRIME-RL/Entropy-Mechanism-of-RL/issues/20).
    """

    names = ("clip_cov",)
    formula = (
        r"\begin{cases} 0 & t \text{ drawn from } c_{\text{low}} < \operatorname{cov}_t < c_{\text{high}} \\ "
        r"L_t^{\text{PPO}} & \text{else} \end{cases}, \qquad "
        r"\operatorname{cov}_t = (A_t - \bar{A})(\log \pi_t - \overline{\log \pi})"
    )
    needs = ("old_logprobs",)
    token_wise = True

    clip_low: ClipWidth = 0.2
    clip_high: NonNegative = 0.2
    ratio: Share = 2e-4  # the share of tokens that it takes out
    cov_low: float = 1.0  # from those with covariances above
    cov_high: float = 5.0  # and below

    def select(self, advantages: Tensor, logprobs: Tensor) -> Tensor:
        covariance = token_covariance(advantages, logprobs)
        candidates = ((covariance > self.cov_low) & (covariance < self.cov_high)).nonzero().squeeze(-1)
        number = max(int(self.ratio * len(covariance)), 1)
        draw = torch.Generator().manual_seed(len(covariance))
        order = torch.randperm(len(candidates), generator=draw).to(candidates.device)
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        chosen[candidates[order[:number]]] = True
        return chosen

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        change, advantages = log_ratio(inputs), masked_advantages(inputs)
        losses, metrics = clipped_surrogate(change, advantages, self.clip_low, self.clip_high, math.inf)
        # A token that the ratio clip already holds has no gradient to take out.
        free = inputs.loss_mask & (metrics["pg_clipfrac_higher"] == 0)
        chosen = _selection(self, inputs, advantages) & free
        names = ("ppo_kl", "pg_clipfrac_higher")
        return torch.where(chosen, 0.0, losses), {
            **{name: metrics[name] for name in names},
            "cov_frac": chosen.to(change.dtype),
        }


@dataclass(frozen=True, slots=True)
class KLCov(PolicyLoss):
    """−A·ratio, plus kl_coef·|log(pi / pi_old)| on the `ratio`·N tokens of the highest covariance.

    At least one token is penalized unless `ratio` is 0; the metric `cov_frac` counts them.

    Use it where entropy falls early, to penalize the responsible tokens instead of dropping them.

    Watch `actor/cov_frac`, `actor/entropy_loss` and `actor/ppo_kl`.

    Fails with one optimizer step a step: |log(pi / pi_old)| is then 0, and so is the penalty
    (github.com/PRIME-RL/Entropy-Mechanism-of-RL/issues/1).
    """

    names = ("kl_cov",)
    formula = (
        r"-A_t \rho_t + \begin{cases} \beta \lvert \log \rho_t \rvert & "
        r"\operatorname{cov}_t \text{ among the highest} \\ 0 & \text{else} \end{cases}"
    )
    needs = ("old_logprobs",)
    token_wise = True

    ratio: Share = 2e-4  # the share of tokens that it penalises
    kl_coef: NonNegative = 1.0

    def select(self, advantages: Tensor, logprobs: Tensor) -> Tensor:
        covariance = token_covariance(advantages, logprobs)
        chosen = torch.zeros_like(covariance, dtype=torch.bool)
        if self.ratio > 0 and len(covariance):
            chosen[covariance.topk(max(int(self.ratio * len(covariance)), 1)).indices] = True
        return chosen

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        change, advantages = log_ratio(inputs), masked_advantages(inputs)
        chosen = _selection(self, inputs, advantages) & inputs.loss_mask
        penalty = torch.where(chosen, self.kl_coef * change.abs(), 0.0)
        metrics = {"ppo_kl": -change.detach(), "cov_frac": chosen.to(change.dtype)}
        return -advantages * change.exp() + penalty, metrics


def token_covariance(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Return (A − mean A)·(log pi − mean log pi) of each of M tokens, float64 [M]."""
    check_tensors("token_covariance", "[M]", advantages=advantages, logprobs=logprobs)
    advantages, logprobs = advantages.detach().double(), logprobs.detach().double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _selection(loss: SelectingLoss, inputs: LossInputs, advantages: Tensor) -> Tensor:
    if inputs.selected is not None:
        return inputs.selected
    mask = inputs.loss_mask
    chosen = loss.select(advantages[mask], inputs.logprobs[mask])
    return torch.zeros_like(mask).masked_scatter(mask, chosen)
