"""Estimators of the KL from the reference policy, one number per sampled token, and the KL penalty in the reward.

After Schulman, "Approximating KL divergence" (2020): with tokens drawn from the policy and
difference = log pi − log pi_ref, k1 = difference, k2 = difference² / 2, k3 = exp(−difference) − 1 + difference.
As a loss term only k2 has the KL's gradient in expectation; the straight-through forms ("k1+", "k3+") have the value of
k1 or k3 and the gradient of k2. In the reward nothing is differentiated, and k1 is the unbiased choice. `full` is the
exact KL of the two distributions at a token, from both models' logits (`token_model`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from r1_core.registry import Registry
from r1_core.types import check_tensors

EXPONENT_LIMIT = 20.0
TOP = "top"  # the name of `top_forward`, which compares with k tokens of the teacher in place of its model
LEAST = -1e30  # in place of −inf, where a gradient would be NaN
FULL = "full"  # the name of `full`, which is not among the estimators: a token's log-probs do not suffice for it


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi − log pi_ref: unbiased, of either sign; its gradient carries no KL signal."""
    return _gap(logprobs, ref_logprobs)


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log pi − log pi_ref|."""
    return _gap(logprobs, ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi − log pi_ref)² / 2: biased, low variance, with the KL's gradient."""
    return 0.5 * _gap(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref / pi − 1 + log(pi / pi_ref): unbiased, never negative, low variance (arXiv 2402.03300).

    Where pi_ref / pi exceeds e^20 the exponential continues as a straight line. Clamping the estimate, as others do at
    10, would remove the gradient towards the reference from the tokens that need it most.
    """
    gap = -_gap(logprobs, ref_logprobs)
    excess = (gap - EXPONENT_LIMIT).clamp(min=0.0)
    return gap.clamp(max=EXPONENT_LIMIT).exp() * (1.0 + excess) - 1.0 - gap


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    return _straight_through(k1(logprobs, ref_logprobs), k2(logprobs, ref_logprobs))


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    return _straight_through(k3(logprobs, ref_logprobs), k2(logprobs, ref_logprobs))


def full(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi, pi_ref) = Σ_v pi_v (log pi_v − log pi_ref,v), exactly: from log-distributions [..., V] to [...].

    Tokens with probability 0 under pi (log-prob −inf) count 0.
    """
    possible = logprobs > -torch.inf
    gap = torch.where(possible, _gap(logprobs, ref_logprobs), 0.0)
    return (torch.where(possible, logprobs, 0.0).exp() * gap).sum(-1)


def forward(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """KL(pi_ref, pi), exactly, from log-distributions [..., V] to [...]: the policy covers all that pi_ref does."""
    return full(ref_logprobs, logprobs)


def jensen_shannon(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(KL(pi, m) + KL(pi_ref, m)) / 2 with m the mean of both, at most log 2: [..., V] to [...] (arXiv 2306.13649)."""
    # Where both are −inf, the gradient of `logaddexp` would be NaN.
    possible = torch.maximum(logprobs, ref_logprobs) > -torch.inf
    mean = torch.logaddexp(*(torch.where(possible, each, 0.0) for each in (logprobs, ref_logprobs))) - math.log(2)
    return 0.5 * (full(logprobs, mean) + full(ref_logprobs, mean))


def top_forward(logprobs: Tensor, top: Tensor, top_ids: Tensor) -> Tensor:
    """KL(pi_ref, pi) over k tokens and one bin of all others: [..., V] and twice [..., k] to [...].

    At most the KL over the vocabulary, and equal to it for k = V. 0 where `top` is NaN.

    Args:
        top: log-probs of pi_ref's most likely tokens; −inf: none.
        top_ids: those tokens, each once; others than 0 to V − 1 count with the bin.
    """
    size = logprobs.shape[-1]
    inside = (top_ids >= 0) & (top_ids < size)
    ids = torch.where(inside, top_ids, size).long()
    listed = torch.zeros(*logprobs.shape[:-1], size + 1, dtype=torch.bool, device=logprobs.device)
    listed = listed.scatter_(-1, ids, True)[..., :size]
    theirs = torch.where(inside, top.to(logprobs.dtype), -torch.inf)
    own = torch.where(inside, logprobs.gather(-1, ids.clamp(max=size - 1)), 0.0)
    known = ~top.isnan().any(-1)
    # All others: what the policy gives none of can be no bin.
    possible = known & (torch.where(listed, -torch.inf, logprobs) > -torch.inf).any(-1)
    rest = torch.where(possible[..., None] & ~listed, logprobs, LEAST).logsumexp(-1)
    mass = torch.where(possible, 1.0 - theirs.exp().sum(-1), 0.0).clamp(min=0.0)
    found = full(torch.where(known[..., None], theirs, -torch.inf), own) + torch.xlogy(mass, mass) - mass * rest
    return torch.where(known, found, 0.0)


def reward_penalties(name: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return coef · KL of each trained token, detached [N, R], 0 outside the mask: the KL penalty in the reward.

    arXiv 2203.02155 (InstructGPT). Pass it as `AdvantageInputs.token_penalties`. `name` is an estimator of this module;
    `logprobs` and `ref_logprobs` [N, R] are those of the sampling policy and the reference.
    """
    check_tensors("reward_penalties", "[N, R]", mask=mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    mask = mask.bool()
    policy = torch.where(mask, logprobs.detach(), 0.0)
    return coef * get(name)(policy, torch.where(mask, ref_logprobs.detach(), 0.0))


def sequence_mean(divergence: Tensor, mask: Tensor) -> float:
    """Return the mean over sequences of the token mean of divergence [N, R], the input of a KL controller.

    Sequences without trained tokens do not count; 0 if there are none.
    """
    check_tensors("sequence_mean", "[N, R]", mask=mask, divergence=divergence)
    mask = mask.bool()
    counts = mask.sum(-1)
    sums = torch.where(mask, divergence, 0.0).double().sum(-1)
    return float((sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1))


def _gap(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    check_tensors("KL", "[...]", logprobs=logprobs, ref_logprobs=ref_logprobs)
    return logprobs - ref_logprobs


def _straight_through(value: Tensor, slope: Tensor) -> Tensor:
    return value.detach() + (slope - slope.detach())


KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "KL penalty",
    {
        "kl": k1,
        "abs": absolute,
        "mse": k2,
        "low_var_kl": k3,
        "k1": k1,
        "k2": k2,
        "k3": k3,
        "k1+": k1_plus,
        "k3+": k3_plus,
    },
)
# Of two log-distributions [..., V].
DIVERGENCES: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "divergence", {"reverse_kl": full, "forward_kl": forward, "jsd": jensen_shannon}
)
register = KL_ESTIMATORS.register
get = KL_ESTIMATORS.get
