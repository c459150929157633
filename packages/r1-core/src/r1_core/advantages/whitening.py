"""Masked mean, variance and whitening, computed in float64 and exact for equal values.

whiten(x) = (x − mean) / sqrt(variance + eps), over all trained tokens of the batch (arXiv 2005.12729, among the
code-level optimisations of PPO). Values are shifted by one of them, the pivot: equal values become exactly 0, and
values like 1000 ± 0.01 keep their digits. One pass then suffices, because (pivot − mean)² is at most n times the
variance.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from r1_core.advantages.scan import row_blocks, row_sums
from r1_core.types import check_tensors

Blocks = Callable[[slice], Tensor]  # gives some rows of the values, float64; arbitrary off the mask


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values [...] where mask [...] is true: a float64 scalar, 0 if there are none."""
    _check(values, mask)
    pivot, distances = _distances(values.double(), mask.bool())
    return pivot + distances.sum() / mask.bool().sum().clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of values [...] where mask [...] is true, over n − 1 or n: float64, 0 for fewer than two."""
    _check(values, mask)
    _, distances = _distances(values.double(), mask.bool())
    return _moments(distances.sum(), distances.square().sum(), mask.bool().sum(), unbiased)[1]


def whiten(
    values: Tensor,
    mask: Tensor,
    eps: float = 1e-8,
    shift_mean: bool = True,
    unbiased: bool = True,
    norm_by_std: bool = True,
) -> Tensor:
    """Return values [...] with mean 0 (unchanged if not `shift_mean`) and variance 1, float64, 0 outside the mask.

    `unbiased=False` uses max(variance over n, eps), as OpenRLHF and LMM-R1 do; `norm_by_std=False` keeps the variance.
    """
    _check(values, mask)
    row, trained = values.double().reshape(1, -1), mask.bool().reshape(1, -1)
    whitened = whiten_blocks(lambda rows: row[rows], trained, torch.float64, eps, shift_mean, unbiased, norm_by_std)
    return whitened.reshape(values.shape)


def whiten_blocks(
    blocks: Blocks,
    mask: Tensor,
    dtype: torch.dtype,
    eps: float = 1e-8,
    shift_mean: bool = True,
    unbiased: bool = True,
    norm_by_std: bool = True,
) -> Tensor:
    """`whiten` for values [N, R] computed a few rows at a time, so that they need not all exist in float64.

    Only distances from the pivot are stored in `dtype`, the result's; they lose no significant digits.
    """
    whitened = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    if not mask.numel():
        return whitened
    lengths = row_sums(mask)
    row = int((lengths > 0).byte().argmax())
    pivot = _distances(blocks(slice(row, row + 1)), mask[row : row + 1])[0]
    total = squares = torch.zeros((), dtype=torch.float64, device=mask.device)
    for rows in row_blocks(mask.shape):
        distances = torch.where(mask[rows], blocks(rows) - pivot, 0.0)
        total, squares = total + distances.sum(), squares + torch.linalg.vector_norm(distances).square()
        whitened[rows] = distances
    offset, variance = _moments(total, squares, lengths.sum(), unbiased)
    scale, mean = _scale(variance, eps, unbiased, norm_by_std), 0.0 if shift_mean else pivot + offset
    for rows in row_blocks(mask.shape):
        whitened[rows].sub_(offset).mul_(scale).add_(mean).masked_fill_(~mask[rows], 0.0)
    return whitened


def whiten_rows(
    values: Tensor, lengths: Tensor, eps: float = 1e-8, unbiased: bool = True, norm_by_std: bool = True
) -> Tensor:
    """`whiten` for values [N], each shared by the `lengths` [N] tokens of its row: float64 [N]."""
    _, distances = _distances(values.double(), lengths > 0)
    total, squares = (lengths * distances).sum(), (lengths * distances.square()).sum()
    offset, variance = _moments(total, squares, lengths.sum(), unbiased)
    return (distances - offset) * _scale(variance, eps, unbiased, norm_by_std)


def _check(values: Tensor, mask: Tensor) -> None:
    check_tensors("whitening", "[...]", getattr(values, "shape", ()), values=values, mask=mask)


def _distances(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pivot (the first value where mask is true) and the distances from it, 0 outside the mask."""
    if not values.numel():
        return values.new_zeros(()), values
    pivot = torch.where(mask.any(), values.flatten()[mask.flatten().byte().argmax()], 0.0)
    return pivot, torch.where(mask, values - pivot, 0.0)


def _moments(total: Tensor, squares: Tensor, count: Tensor, unbiased: bool) -> tuple[Tensor, Tensor]:
    """Return the mean distance from the pivot and the variance, from the sums of n distances and of their squares."""
    offset = total / count.clamp(min=1)
    variance = (squares - total * offset) / (count - int(unbiased)).clamp(min=1)
    return offset, variance.clamp(min=0.0)


def _scale(variance: Tensor, eps: float, unbiased: bool, norm_by_std: bool) -> Tensor:
    if not norm_by_std:
        return torch.ones_like(variance)
    return torch.rsqrt(variance + eps if unbiased else variance.clamp(min=eps))
