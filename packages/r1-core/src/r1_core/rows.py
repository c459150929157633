"""Layouts of per-token fields: per sample, flat, and in rows.

For N samples with T trained tokens among them and at most R in one:

- per sample [L], prompt and response, as `Sample` stores its fields,
- flat [T], the trained tokens sample after sample, as a forward pass computes them,
- rows [N, R], a sample's trained tokens in a row, 0 on the right, as estimators and losses read them.

Example: samples that train their last 2 and 1 tokens, with `advantages` [0, 0, 3, 4] and [0, 5]: flat [3, 4, 5], rows
[[3, 4], [5, 0]].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from r1_core.types import Sample, check_tensors


def trained(samples: Sequence[Sample]) -> Tensor:
    """Return where rows have tokens, bool [N, R]. R is at least 1."""
    lengths = torch.tensor([sample.response_length for sample in samples])
    return torch.arange(max(1, int(lengths.max()))) < lengths[:, None]


def to_rows(flat: Tensor, trained: Tensor) -> Tensor:
    """Lay out flat values [T] in rows [N, R], 0 where `trained` is false; differentiable."""
    return flat.new_zeros(trained.shape).masked_scatter(trained, flat)


def known(samples: Sequence[Sample], name: str) -> bool:
    """Whether samples have a per-token field.

    Raises ValueError if only some do: results for a part of a step would depend on how it is split.
    """
    lacking = [i for i, sample in enumerate(samples) if sample.get(name) is None]
    if lacking and len(lacking) < len(samples):
        raise ValueError(
            f"sample {lacking[0]} (group {samples[lacking[0]].group_id}) has no {name}, which "
            f"{len(samples) - len(lacking)} of {len(samples)} samples have; give it to all samples of a step or to none"
        )
    return not lacking


def rows(samples: Sequence[Sample], name: str) -> Tensor:
    """Return a per-token field in rows [N, R], in its own dtype. Raises ValueError if a sample lacks it."""
    return to_rows(tokens(samples, name), trained(samples))


def tokens(samples: Sequence[Sample], name: str) -> Tensor:
    """Return a per-token field flat [T], in its own dtype. Raises ValueError if a sample lacks it."""
    columns = []
    for i, sample in enumerate(samples):
        column = sample.get(name)
        if column is None:
            raise ValueError(f"sample {i} (group {sample.group_id}) has no {name}, which is needed of all samples")
        columns.append(column)
    return flatten(columns, samples)


def not_finite(samples: Sequence[Sample], name: str) -> list[int]:
    """Return the indices of samples with a NaN or infinite value of a field on a trained token."""
    wrong = ~rows(samples, name).isfinite()
    places: list[int] = wrong.any(-1).nonzero().flatten().tolist()
    return places


def flatten(columns: Sequence[Tensor], samples: Sequence[Sample]) -> Tensor:
    """Return per-token values, one [L] for each sample, flat [T]."""
    return torch.cat(list(columns)).masked_select(torch.cat([sample.loss_mask for sample in samples]))


def with_tokens(samples: Sequence[Sample], **flat: Tensor) -> list[Sample]:
    """Return the samples with per-token fields set from flat values [T]; 0 or false on untrained tokens."""
    if not samples or not flat:
        return list(samples)
    mask = torch.cat([sample.loss_mask for sample in samples])
    check_tensors("with_tokens", "[T]", (int(mask.sum()),), **flat)
    lengths = [len(sample.token_ids) for sample in samples]
    columns = {name: to_rows(values, mask).split(lengths) for name, values in flat.items()}
    return [
        replace(sample, **{name: column[i] for name, column in columns.items()}) for i, sample in enumerate(samples)
    ]


class TokenTable:
    """Collects per-token fields of micro-batches: one row [T] for each field."""

    def __init__(self, samples: Sequence[Sample], fields: Sequence[str], device: torch.device) -> None:
        """Allocate the table; every trained token must be put once, on one rank."""
        self._fields = fields
        self._lengths = [sample.response_length for sample in samples]
        self._ends = torch.tensor(self._lengths).cumsum(0).tolist()
        self._values = torch.zeros(len(fields), sum(self._lengths), dtype=torch.float32, device=device)

    def put(self, indices: Sequence[int], values: Tensor) -> None:
        """Store a micro-batch's values [its trained tokens, fields].

        `indices` are its samples'; fillers come last, without trained tokens.
        """
        for i, own in zip(indices, values.split([self._lengths[i] for i in indices]), strict=True):
            self._values[:, self._ends[i] - self._lengths[i] : self._ends[i]] = own.T

    def columns(self, total: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the fields flat, each float32 [T] on the CPU.

        `total` sums the tables of all ranks, all of which must call this.
        """
        return dict(zip(self._fields, total(self._values).cpu(), strict=True))
