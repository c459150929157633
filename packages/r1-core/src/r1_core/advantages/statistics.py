"""Statistics of groups, discounted sums along tokens, and whitening over a batch.

whiten(x) = (x − mean) / sqrt(variance + eps), over all trained tokens of the batch (arXiv 2005.12729, among the
code-level optimisations of PPO). Values are shifted by one of them, the pivot: equal values become exactly 0, and
values like 1000 ± 0.01 keep their digits. One pass then suffices, because (pivot − mean)² is at most n times the
variance.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.types import check_tensors


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The statistics of each sample's group; every tensor is [N]."""

    mean: Tensor  # float64
    distance: Tensor  # float64, of each reward from the mean; exactly 0 where all rewards of the group are equal
    std: Tensor  # float64, divided by size - 1; 0 for a group of one
    size: Tensor  # int64
    constant: Tensor  # bool, true where all rewards of the group are the same number

    def standardized(self, eps: float) -> Tensor:
        """Return distance / (std + eps), float64 [N]; exactly 0 in a constant group, even if eps is 0."""
        return torch.where(self.constant, 0.0, self.distance / (self.std + eps))


def check_group(rewards: Tensor, group_ids: Tensor) -> None:
    check_tensors("rewards of groups", "[N]", rewards=rewards, group_ids=group_ids)


def group_statistics(rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Compute mean and unbiased std of each group's rewards [N], repeated for its samples.

    Uses float64 and two passes: in one pass, rewards like 1000 ± 0.01 lose their variance to cancellation. The mean is
    relative to the group's lowest reward, so that equal rewards give exactly 0.
    """
    check_group(rewards, group_ids)
    rewards = rewards.double()
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(sizes.shape[0])
    low = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    above = rewards - low[index]
    offset = zeros.index_add(0, index, above) / sizes
    distance = above - offset[index]
    std = (zeros.index_add(0, index, distance.square()) / (sizes - 1).clamp(min=1)).sqrt()
    high = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return GroupStatistics((low + offset)[index], distance, std[index], sizes[index], (low == high)[index])


# A chunk of columns is no longer than keeps decay^length above this, so that no weight underflows.
SMALLEST_WEIGHT = 1e-150
# Rows go through in blocks of about this many numbers, so that what lies between stays in the processor's cache.
BLOCK_SIZE = 1 << 17


def row_blocks(shape: torch.Size) -> Iterator[slice]:
    """Split the rows of a shape [N, ...] into slices that fit the cache."""
    rows = max(1, BLOCK_SIZE // max(math.prod(shape[1:]), 1))
    for start in range(0, shape[0], rows):
        yield slice(start, start + rows)


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
    check_tensors("discounted_sums", "[N, R]", values=values, mask=mask)
    sums = torch.empty(values.shape, dtype=torch.float64, device=values.device)
    if sums.numel():
        for rows in row_blocks(values.shape):
            sums[rows] = scan(values[rows], mask[rows], decay)
    return sums


def scan(values: Tensor, mask: Tensor, decay: float, turns: Tensor | None = None, turn_decay: float = 1.0) -> Tensor:
    """`discounted_sums` of a block of rows that fits the cache; arbitrary but finite outside the mask.

    With `turns` [N, R], ascending in a row, the decay from a token to one of another turn is `decay · turn_decay`.

    With n_t trained tokens before t, S_t = Σ_(s ≥ t) decay^n_s · values_s / decay^n_t. Summing from the right adds
    small terms first, so this is as exact as the recursion. Long rows or strong decay are split into chunks whose
    weights do not underflow; there are at most R · ln(decay) / ln(1e-150) chunks.
    """
    if not (0 <= decay <= 1 and 0 <= turn_decay <= 1):
        raise ValueError(f"decay is {decay} and turn_decay {turn_decay}; both must lie in [0, 1]")
    values = torch.where(mask, values, 0.0).double()
    if decay == 1 and (turns is None or turn_decay == 1):
        return _sums_to_the_right(values)
    if decay == 0:
        return _next_trained(values, mask)
    width = values.shape[-1]
    before, turns_before = _trained_before(mask), None if turns is None else _turns_before(mask, turns)
    turn_decay = 1.0 if turns is None else max(turn_decay, SMALLEST_WEIGHT)  # 0 would divide by 0
    chunk = min(width, max(1, int(math.log(SMALLEST_WEIGHT) / (math.log(decay) + math.log(turn_decay)))))
    counts = torch.arange(chunk + 1, dtype=torch.float64, device=values.device)
    powers, turn_powers = torch.pow(decay, counts), torch.pow(turn_decay, counts)
    carry = values.new_zeros(values.shape[0], 1)
    for start in range((width - 1) // chunk * chunk, -1, -chunk):
        stop = min(start + chunk, width)
        weights = powers[before[..., start : stop + 1] - before[..., start : start + 1]]
        if turns_before is not None:
            weights = weights * turn_powers[turns_before[:, start : stop + 1] - turns_before[:, start : start + 1]]
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


def _turns_before(mask: Tensor, turns: Tensor) -> Tensor:
    """Count the turns that end before each column, [N, R + 1]."""
    running = torch.where(mask, turns, -1).cummax(-1).values
    ended = torch.nn.functional.pad((running.diff(dim=-1) > 0).cumsum(-1), (1, 0))
    return torch.cat([ended, ended[:, -1:]], dim=-1)


def _trained_before(mask: Tensor) -> Tensor:
    """Count the trained tokens before each column: [N, R + 1], or [R + 1] for all rows if none has a gap."""
    if not has_gaps(mask):
        # Past a row's end everything is 0, so counting on there does no harm.
        return torch.arange(mask.shape[-1] + 1, device=mask.device)
    return torch.nn.functional.pad(mask.cumsum(-1), (1, 0))


Blocks = Callable[[slice], Tensor]  # gives some rows of the values, float64; arbitrary off the mask


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of values [...] where mask [...] is true: a float64 scalar, 0 if there are none."""
    check_tensors("whitening", "[...]", values=values, mask=mask)
    pivot, distances = _distances(values.double(), mask.bool())
    return pivot + distances.sum() / mask.bool().sum().clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of values [...] where mask [...] is true, over n − 1 or n: float64, 0 for fewer than two."""
    check_tensors("whitening", "[...]", values=values, mask=mask)
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
    check_tensors("whitening", "[...]", values=values, mask=mask)
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
