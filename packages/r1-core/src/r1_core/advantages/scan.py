"""Row sums and discounted sums from each token to the end, without a loop over tokens."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from r1_core.types import check_tensors

# A chunk of columns is no longer than keeps decay^length above this, so that no weight underflows.
SMALLEST_WEIGHT = 1e-150
# Rows go through in blocks of about this many numbers, so that what lies between stays in the processor's cache.
BLOCK_SIZE = 1 << 17


def row_blocks(shape: torch.Size) -> Iterator[slice]:
    """Split the rows of a shape [N, ...] into slices that fit the cache."""
    rows = max(1, BLOCK_SIZE // max(math.prod(shape[1:]), 1))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


def row_sums(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum values [N, R], of any dtype, where mask [N, R] is true (None: everywhere): float64 [N]."""
    sums = torch.zeros(values.shape[0], dtype=torch.float64, device=values.device)
    # Truth values are counted as 32-bit integers, several times faster than as float64.
    kind = torch.int32 if values.dtype == torch.bool else torch.float64
    for rows in row_blocks(values.shape):
        block = values[rows] if mask is None else torch.where(mask[rows], values[rows], 0.0)
        sums[rows] = block.sum(-1, dtype=kind)
    return sums


def discounted_sums(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Return S float64 [N, R] with S_t = values_t + decay · S_(next trained token), by one cumulative sum.

    `values` [N, R] count 0 where `mask` bool [N, R] is false. Such tokens are skipped without discount, so a turn
    before an observation gets full credit for later rewards. Raises ValueError if decay is outside [0, 1].
    """
    check_tensors("discounted_sums", "[N, R]", values=values)
    check_tensors("discounted_sums", "[N, R]", values.shape, mask=mask)
    sums = torch.empty(values.shape, dtype=torch.float64, device=values.device)
    if sums.numel():
        for rows in row_blocks(values.shape):
            sums[rows] = scan(values[rows], mask[rows], decay)
    return sums


def scan(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """`discounted_sums` of a block of rows that fits the cache; arbitrary but finite outside the mask.

    With n_t trained tokens before t, S_t = Σ_(s ≥ t) decay^n_s · values_s / decay^n_t. Summing from the right adds
    small terms first, so this is as exact as the recursion. Long rows or strong decay are split into chunks whose
    weights do not underflow; there are at most R · ln(decay) / ln(1e-150) chunks.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}; it must lie in [0, 1]")
    values = torch.where(mask, values, 0.0).double()
    if decay == 1:
        return _sums_to_the_right(values)
    if decay == 0:
        return _next_trained(values, mask)
    width = values.shape[-1]
    before = _trained_before(mask)
    chunk = min(width, max(1, int(math.log(SMALLEST_WEIGHT) / math.log(decay))))
    powers = torch.pow(decay, torch.arange(chunk + 1, dtype=torch.float64, device=values.device))
    carry = values.new_zeros(values.shape[0], 1)
    for start in range((width - 1) // chunk * chunk, -1, -chunk):
        stop = min(start + chunk, width)
        weights = powers[before[..., start : stop + 1] - before[..., start : start + 1]]
        weighted = _sums_to_the_right(values[:, start:stop].mul_(weights[..., :-1]))
        torch.div(weighted.add_(carry * weights[..., -1:]), weights[..., :-1], out=values[:, start:stop])
        carry = values[:, start : start + 1]
    return values


def following(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value of the next trained token after each column: float64, 0 past the last."""
    values = torch.where(mask, values, 0.0).double()
    if has_gaps(mask):
        values = _next_trained(values, mask)
    return torch.nn.functional.pad(values[:, 1:], (0, 1))


def has_gaps(mask: Tensor) -> bool:
    lengths, pairs = (part.sum(-1, dtype=torch.int32) for part in (mask, mask[:, 1:] & mask[:, :-1]))
    return not torch.equal(lengths, pairs + mask[:, 0])


def _sums_to_the_right(values: Tensor) -> Tensor:
    return values.flip(-1).cumsum_(-1).flip(-1)


def _next_trained(values: Tensor, mask: Tensor) -> Tensor:
    width = values.shape[-1]
    columns = torch.where(mask, torch.arange(width, device=mask.device), width)
    columns = columns.flip(-1).cummin(-1).values.flip(-1)
    return torch.nn.functional.pad(values, (0, 1)).gather(-1, columns)


def _trained_before(mask: Tensor) -> Tensor:
    """Count the trained tokens before each column: [N, R + 1], or [R + 1] for all rows if none has a gap."""
    if not has_gaps(mask):
        # Past a row's end everything is 0, so counting on there does no harm.
        return torch.arange(mask.shape[-1] + 1, device=mask.device)
    return torch.nn.functional.pad(mask.cumsum(-1), (1, 0))
