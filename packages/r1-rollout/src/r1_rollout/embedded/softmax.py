"""Attention over columns in parts, whose softmaxes share each row's largest score."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from r1_rollout.embedded.products import score_keys, sum_values
from r1_rollout.embedded.scores import ScoreChange
from r1_rollout.embedded.segments import HIDDEN, Readers, Sight

LOG2_E = math.log2(math.e)


class AttentionPart(NamedTuple):
    """Some columns of keys and values, and the rows that read them."""

    keys: Tensor  # [places, heads, size, all columns]
    values: Tensor  # [places, heads, all columns, size]
    sight: Sight
    readers: Readers


def attend(query: Tensor, parts: Sequence[AttentionPart], change: ScoreChange | None = None) -> Tensor:
    """Attend to all parts; every row reads a column that it sees.

    Args:
        query: [rows, heads, queries, size], scaled for a softmax to the base of 2: exp is 20 to 100 times as slow as
            exp2 on a CPU where columns are masked.

    Returns:
        [rows, heads, queries, size], in float32 or higher precision.
    """
    scores = [_score(query, part, change) for part in parts]
    peak = None
    for score, part in zip(scores, parts, strict=True):
        own = part.readers.unsort(score.amax(dim=-1, keepdim=True), query.shape[2])
        peak = _combine(torch.maximum, peak, own, part.readers.rows, len(query), HIDDEN)
    assert peak is not None
    output = total = None
    if change is not None and change.sinks is not None:  # columns whose values are 0
        sinks = LOG2_E * change.sinks.to(peak).view(1, *query.shape[1:3], 1)
        peak = torch.maximum(peak, sinks)
        total = (sinks - peak).exp2_()
    for score, part in zip(scores, parts, strict=True):
        weights = score.sub_(part.readers.sort(peak, len(score))).exp2_()
        sums = sum_values(weights.to(part.values.dtype), part.values, part.sight.columns).to(weights.dtype)
        own = part.readers.unsort(sums, query.shape[2])
        output = _combine(torch.add, output, own, part.readers.rows, len(query), 0.0)
        own = part.readers.unsort(weights.sum(dim=-1, keepdim=True), query.shape[2])
        total = _combine(torch.add, total, own, part.readers.rows, len(query), 0.0)
    assert output is not None
    assert total is not None
    return output / total


def _score(query: Tensor, part: AttentionPart, change: ScoreChange | None) -> Tensor:
    """Return the scores [places, heads, members × queries, columns], in float32 or higher precision."""
    scores = score_keys(part.readers.sort(query, len(part.keys)), part.keys, part.sight.columns)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if change is not None:
        scores = change.bound(scores, LOG2_E)
    return scores if part.sight.bias is None else scores.add_(part.sight.bias)


def _combine(
    operation: Callable[[Tensor, Tensor], Tensor],
    whole: Tensor | None,
    own: Tensor,
    readers: Tensor,
    rows: int,
    nothing: float,
) -> Tensor:
    """Combine the numbers of some rows with those of all; `nothing` is that of a row that has none before."""
    if len(readers) == rows:
        return own if whole is None else operation(whole, own)
    if whole is None:  # behind a window, some rows read no column of the first part
        whole = own.new_full((rows, *own.shape[1:]), nothing)
    whole[readers] = operation(whole[readers], own)
    return whole
