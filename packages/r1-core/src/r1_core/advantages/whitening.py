"""Masked mean, variance and whitening, in float64 and exact for equal values.

whiten(x) = (x − mean) / sqrt(variance + eps), over all trained tokens of the batch (arXiv 2005.12729 section 2,
"advantage normalization", among the code-level optimisations of PPO). Values are first measured from one of
themselves, the pivot: equal values then become exactly 0, and values like 1000 ± 0.01 keep their digits. One pass
is enough from there, because (pivot − mean)² is at most n times the variance.
"""

import torch
from torch import Tensor

from r1_core.advantages.scan import row_blocks


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [...] where mask [...] is true: a float64 scalar, 0 if there are none."""
    pivot, offset, _ = _measure_(values.to(torch.float64, copy=True), mask.bool())
    return pivot + offset


def masked_variance(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of values [...] where mask [...] is true, over n − 1 or over n: float64, 0 for fewer than two."""
    return _measure_(values.to(torch.float64, copy=True), mask.bool(), unbiased)[2]


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """Return values [...] with mean 0 (or their own, if not `shift_mean`) and variance 1, float64, 0 off the mask.

    With `unbiased=False` the variance is taken over n and is max(variance, eps), as OpenRLHF and LMM-R1 have it.
    """
    return whiten_(values.to(torch.float64, copy=True), mask, eps, shift_mean, unbiased)


def whiten_(values: Tensor, mask: Tensor, eps: float = 1e-8, shift_mean: bool = True, unbiased: bool = True) -> Tensor:
    """`whiten` in place, for float64 values that nobody else holds."""
    mask = mask.bool()
    pivot, offset, variance = _measure_(values, mask, unbiased)
    scale = torch.rsqrt(variance + eps if unbiased else variance.clamp(min=eps))
    mean = pivot + offset if not shift_mean else 0.0
    for rows in row_blocks(values.shape):
        values[rows].sub_(offset).mul_(scale).add_(mean).masked_fill_(~mask[rows], 0.0)
    return values


def _measure_(values: Tensor, mask: Tensor, unbiased: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Turn values into distances from a pivot, 0 off the mask; return pivot, mean distance and variance."""
    zero = torch.zeros((), dtype=torch.float64, device=values.device)
    if not values.numel():
        return zero, zero, zero
    count = mask.count_nonzero()
    pivot = torch.where(count > 0, values.flatten()[mask.flatten().view(torch.uint8).argmax()], 0.0)
    total, squares = zero, zero
    for rows in row_blocks(values.shape):
        block = values[rows].sub_(pivot).masked_fill_(~mask[rows], 0.0)
        total = total + block.sum()
        squares = squares + torch.linalg.vector_norm(block).square()
    offset = total / count.clamp(min=1)
    variance = (squares - total * offset) / (count - int(unbiased)).clamp(min=1)
    return pivot, offset, variance.clamp(min=0.0)
