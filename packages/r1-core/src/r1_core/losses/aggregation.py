"""Reduce per-token values to one number, divided by the token and sequence counts of the whole optimizer step.

Each function returns a micro-batch's part of the step's mean. The parts of all micro-batches and ranks add up to that
mean, whatever the micro-batch size. Rows without tokens add 0 and are not counted.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from r1_core.registry import Registry
from r1_core.types import Totals, check_mask, check_tensors

# Takes values [B, R], which are 0 outside the mask [B, R], and the step's totals; gives a scalar, linear in values.
Aggregation = Callable[[Tensor, Tensor, Totals], Tensor]


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / tokens: every token of the step weighs the same (DAPO, arXiv 2503.14476).

    BNPO divides by the tokens of the current batch; here that batch is always the whole step, so both are the same.
    """
    return values.sum() / max(totals.tokens, 1)


def sequence_mean_of_means(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ over rows (Σ values / row's tokens) / sequences: every sequence weighs the same (arXiv 2402.03300)."""
    return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(totals.sequences, 1)


def sequence_mean_of_sums(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / sequences: token log-probs are summed, not averaged, so long answers weigh more."""
    return values.sum() / max(totals.sequences, 1)


def fixed_length(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / (sequences · length): divides by a constant, not by each row's length (Dr.GRPO, arXiv 2503.20783).

    The length is `totals.length`, usually the maximum response length.
    """
    return values.sum() / (max(totals.sequences, 1) * max(totals.length, 1))


AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    {
        "token": token_mean,
        "seq": sequence_mean_of_means,
        "token-mean": token_mean,
        "seq-mean-token-mean": sequence_mean_of_means,
        "seq-mean-token-sum": sequence_mean_of_sums,
        "seq-mean-token-sum-norm": fixed_length,
    },
)


def aggregate(values: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """Sum `values` [B, R] under `mask` [B, R] into this micro-batch's part of the step's mean (a scalar).

    `mode` is a name of AGGREGATIONS; another one raises ValueError. Values outside the mask are ignored.
    """
    check_tensors("aggregate", "[B, R]", values=values)
    check_tensors("aggregate", "[B, R]", values.shape, mask=mask)
    check_mask("aggregate", mask)
    return AGGREGATIONS.get(mode)(torch.where(mask, values, 0.0), mask, totals)
