"""Importance weights and rejection for the gap between the engine's policy and the learner's.

The engine samples with other kernels, another precision or older weights. Tokens come from
mu = exp(rollout_logprobs), while the loss assumes pi_old = exp(old_logprobs). With the gap log(pi_old / mu) of a token,
of a sequence (sum over its tokens) or geometric (mean over its tokens), and w = exp(gap):

- truncated importance sampling (TIS): the loss times min(w, upper) (arXiv 1802.01561 for the truncation; for
  language models Yao et al., "Your efficient RL framework secretly brings you off-policy training", 2025),
- IcePop: the loss times w where lower <= w <= upper, else times 0 (Ling team, "Small Leak Can Sink a Great Ship",
  2025),
- rejection: tokens or sequences with too wide a gap leave the batch and its means.

Weights, rejections and diagnostics are computed once per optimizer step, before any gradient, so they do not depend
on the micro-batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from r1_core.losses.policy import LOG_RATIO_LIMIT, row_mean
from r1_core.types import Sample, check_tensors, rows, trained, with_tokens

Level = Literal["token", "sequence", "geometric"]
Measure = Literal["k1", "k2", "k3"]
Span = Literal["token", "sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Keep tokens with lower <= measure <= upper, per token or per sequence (sum, mean or max over its tokens).

    `k1` bounds the ratio exp(gap) on both sides; `k2` = gap² / 2 and `k3` = exp(gap) − 1 − gap, estimates of the
    divergence, are never negative and need only `upper`. The sum of k1 over a sequence gives the sequence's ratio, its
    mean the geometric one.
    """

    measure: Measure
    span: Span
    upper: float
    lower: float = 0.0

    def __post_init__(self) -> None:
        for name, value, kinds in (("measure", self.measure, get_args(Measure)), ("span", self.span, get_args(Span))):
            if value not in kinds:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(kinds)}")
        _check_bounds(self.lower, self.upper)

    def keep(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return `mask` [B, R] without rejected tokens, given the values [B, R] of `log_gap`."""
        check_gap(gap, mask)
        values = self.values(gap, mask)
        if self.measure == "k1":
            values = values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return mask & (values >= self.lower) & (values <= self.upper)

    def values(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return the measure (k1: the gap) of each token [B, R] or each sequence [B, 1]."""
        bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        values = {"k1": gap, "k2": 0.5 * gap.square(), "k3": bounded.exp() - 1.0 - bounded}[self.measure]
        if self.span == "sum":
            return values.sum(-1, keepdim=True)
        if self.span == "mean":
            return row_mean(values, mask)
        if self.span == "max" and mask.shape[-1]:
            return torch.where(mask, values, -torch.inf).amax(-1, keepdim=True)
        return values


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights for the loss, and rejections.

    `level` None: no weights. `outside`: a weight outside [lower, upper] is clamped to the bound (`clamp`, TIS) or set
    to 0 (`zero`, IcePop), which still counts in the mean. `normalize` divides the weights by their mean over the step.
    `rejections` remove tokens from the loss mask.
    """

    level: Level | None = "token"
    upper: float = 2.0
    lower: float = 0.0
    outside: Literal["clamp", "zero"] = "clamp"
    normalize: bool = False
    rejections: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in get_args(Level):
            raise ValueError(f"level is {self.level!r}; it must be one of {', '.join(get_args(Level))}, or None")
        if self.outside not in ("clamp", "zero"):
            raise ValueError(f"outside is {self.outside!r}; it must be clamp or zero")
        _check_bounds(self.lower, self.upper)

    def weights(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return weights [B, R] from the values [B, R] of `log_gap` for the whole step; 0 outside the mask."""
        weights = importance_weights(gap, mask, self.level)
        if self.outside == "clamp":
            weights = weights.clamp(self.lower, self.upper)
        else:
            weights = torch.where((weights >= self.lower) & (weights <= self.upper), weights, 0.0)
        weights = torch.where(mask, weights, 0.0)
        if self.normalize:
            # Sequences weigh the same at their levels, however long; tokens at theirs.
            units, present = (weights, mask) if self.level == "token" else (row_mean(weights, mask), mask.any(-1))
            mean = units.sum() / present.sum().clamp(min=1)
            weights = weights / torch.where(mean > 0, mean, 1.0)
        return weights

    def keep(self, gap: Tensor, mask: Tensor) -> Tensor:
        """Return `mask` [B, R] without rejected tokens."""
        kept = mask
        for rejection in self.rejections:
            kept = kept & rejection.keep(gap, mask)
        return kept


def log_gap(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return log(pi_old / mu) of each token [B, R], 0 outside the mask."""
    check_tensors("log_gap", "[B, R]", mask=mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    return torch.where(mask, old_logprobs - rollout_logprobs, 0.0).detach()


def check_gap(gap: Tensor, mask: Tensor) -> None:
    check_tensors("correction", "[B, R]", mask=mask, gap=gap)


def importance_weights(gap: Tensor, mask: Tensor, level: Level | None) -> Tensor:
    """Return exp(gap) per token, sequence (sum) or sequence mean, [B, R]; 1 for level None, 0 outside the mask."""
    check_gap(gap, mask)
    if level is None:
        gap = torch.zeros_like(gap)
    elif level == "sequence":
        gap = gap.sum(-1, keepdim=True)
    elif level == "geometric":
        gap = row_mean(gap, mask)
    return torch.where(mask, gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), 0.0)


def diagnose(gap: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return scalars that measure the gap between engine and learner over the trained tokens.

    `rollout_gap_mean` and `rollout_gap_max`: of |log pi_old − log mu|; `rollout_kl`: KL(mu, pi_old) by k1,
    `rollout_kl_k3` by k3; `rollout_chi2`: mean of exp(2·gap) − 1. All are 0 without tokens.
    """
    check_gap(gap, mask)
    count = mask.sum().clamp(min=1)
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3, chi2 = torch.where(mask, bounded.exp() - 1.0 - bounded, 0.0), torch.where(mask, (2 * bounded).exp() - 1.0, 0.0)
    return {
        "rollout_gap_mean": gap.abs().sum() / count,
        "rollout_gap_max": gap.abs().max() if gap.numel() else gap.sum(),
        "rollout_kl": -gap.sum() / count,
        "rollout_kl_k3": k3.sum() / count,
        "rollout_chi2": chi2.sum() / count,
    }


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (Σ w)² / (N Σ w²) over the N trained tokens (Kish's effective sample size / N); 1 without tokens."""
    check_tensors("effective_sample_size", "[B, R]", mask.shape, weights=weights)
    squares = weights.square().sum() * mask.sum()
    return torch.where(squares == 0, 1.0, weights.sum().square() / squares)


def correct(samples: Sequence[Sample], correction: Correction) -> tuple[list[Sample], dict[str, float]]:
    """Return an optimizer step's samples with weights and a reduced loss mask, and metrics.

    The metrics are those of `diagnose`, `rollout_ess`, `rollout_weight_mean`, `rollout_weight_max` and
    `rollout_rejected` (share of tokens). Raises ValueError if a sample lacks `old_logprobs` or `rollout_logprobs`.
    """
    if not samples:
        return [], {}
    mask = trained(samples)
    gap = log_gap(rows(samples, "old_logprobs").double(), rows(samples, "rollout_logprobs").double(), mask)
    # A gap that is not finite is no wide gap: it is kept, with a weight that lets the learner skip the step.
    broken = ~gap.isfinite()
    weights = torch.where(broken, torch.nan, correction.weights(gap, mask))
    kept = correction.keep(gap, mask) | broken
    count = mask.sum().clamp(min=1)
    metrics = {
        **diagnose(gap, mask),
        "rollout_ess": effective_sample_size(weights, mask),
        "rollout_weight_mean": weights.sum() / count,
        "rollout_weight_max": weights.max() if weights.numel() else weights.sum(),
        "rollout_rejected": (mask & ~kept).sum().double() / count,
    }
    corrected = with_tokens(samples, weights=weights.float()[mask], loss_mask=kept[mask])
    return corrected, {name: float(value) for name, value in metrics.items()}


def _check_bounds(lower: float, upper: float) -> None:
    if not 0 <= lower <= upper:
        raise ValueError(f"lower and upper are {lower} and {upper}; they need 0 <= lower <= upper")
