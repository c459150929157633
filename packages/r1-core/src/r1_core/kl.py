"""Estimates of the KL divergence from the reference policy, one number per sampled token.

After Schulman, "Approximating KL divergence" (2020): with tokens drawn from the policy and
difference = log pi − log pi_ref, k1 = difference, k2 = difference² / 2, k3 = exp(−difference) − 1 + difference.
"""

from collections.abc import Callable

from torch import Tensor

from r1_core.registry import Registry

EXPONENT_LIMIT = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi − log pi_ref: unbiased, of either sign, with a gradient that carries no KL signal by itself."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log pi − log pi_ref|."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log pi − log pi_ref)² / 2: biased, low variance, and its gradient is the KL's."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """pi_ref / pi − 1 + log(pi / pi_ref): unbiased, never negative, low variance (arXiv 2402.03300 eq. 4).

    Where pi_ref / pi passes e^20 the exponential goes on as a straight line. Clamping the estimate instead, as others
    do at 10, would switch the pull towards the reference off on just those tokens that need it most.
    """
    gap = ref_logprobs - logprobs
    excess = (gap - EXPONENT_LIMIT).clamp(min=0.0)
    return gap.clamp(max=EXPONENT_LIMIT).exp() * (1.0 + excess) - 1.0 - gap


KL_ESTIMATORS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "KL penalty", {"kl": k1, "abs": absolute, "mse": k2, "low_var_kl": k3}
)
register = KL_ESTIMATORS.register
get = KL_ESTIMATORS.get
