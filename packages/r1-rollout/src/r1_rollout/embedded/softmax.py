"""A softmax over columns that are read in parts; parts are merged exactly (FlashAttention, arXiv 2205.14135)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from r1_rollout.embedded.scores import ScoreChange

LOG2_E = math.log2(math.e)


class Partial(NamedTuple):
    """An unnormalised softmax over some of the columns, in float32 or higher precision."""

    output: Tensor  # [batch, heads, queries, size], the values weighted by 2^(score - peak)
    peak: Tensor  # [batch, heads, queries, 1], the largest score
    total: Tensor  # [batch, heads, queries, 1], the sum of the weights


def partial_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, change: ScoreChange | None = None
) -> Partial:
    """Attend to some of the columns.

    Args:
        query: [batch, heads, queries, size], scaled for a softmax to the base of 2: exp is 20 to 100 times as slow as
            exp2 on a CPU where columns are masked.
        keys: [batch, heads, size, columns].
        values: [batch, heads, columns, size].
        bias: [batch, 1, 1, columns], 0 or -inf or `HIDDEN`, if some columns are masked.
    """
    fine = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ keys).to(fine)
    if change is not None:
        scores = change.bound(scores, LOG2_E)
    if bias is not None:
        scores.add_(bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp2_()
    output = weights.to(values.dtype) @ values
    return Partial(output.to(fine), peak, weights.sum(dim=-1, keepdim=True))


def merge(first: Partial, second: Partial) -> Partial:
    peak = torch.maximum(first.peak, second.peak)
    first_scale, second_scale = (first.peak - peak).exp2(), (second.peak - peak).exp2()
    output = first.output * first_scale + second.output * second_scale
    return Partial(output, peak, first.total * first_scale + second.total * second_scale)
