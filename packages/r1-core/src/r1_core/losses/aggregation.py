"""From per-token values to one number, divided by the counts of the whole optimizer step."""

from typing import Literal, get_args

import torch
from torch import Tensor

from r1_core.types import Totals

Aggregation = Literal["token", "seq"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


def aggregate(values: Tensor, mask: Tensor, mode: Aggregation, totals: Totals) -> Tensor:
    """Sum `values` [B, R] under `mask` [B, R] into this micro-batch's share of the step's mean (a scalar).

    `token`: every token weighs the same, sum / totals.tokens (arXiv 2503.14476 eq. 8). `seq`: every sequence weighs
    the same, sum of each row's token mean / totals.sequences (arXiv 2402.03300 eq. 3); a row without tokens adds 0
    and is not counted. The shares of all micro-batches add up to the mean, however the step was cut.
    """
    values = torch.where(mask, values, 0.0)
    if mode == "token":
        return values.sum() / max(totals.tokens, 1)
    if mode == "seq":
        means = values.sum(-1) / mask.sum(-1).clamp(min=1)
        return means.sum() / max(totals.sequences, 1)
    raise ValueError(f"no aggregation is called {mode!r} (there are: {', '.join(AGGREGATIONS)})")
