"""What a forward pass finds of each sample's tokens, taken down by micro-batch, then put into the samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from r1_core.learner.parallel import Parallel
from r1_core.types import Sample


class Notes:
    """Values of trained tokens, one column for each of some fields of `Sample`."""

    def __init__(self, samples: Sequence[Sample], fields: Sequence[str], device: torch.device) -> None:
        """Make room; every trained token must be put once, on one rank."""
        self._samples, self._fields = samples, fields
        self._ends = torch.tensor([sample.response_length for sample in samples]).cumsum(0).tolist()
        total = self._ends[-1] if samples else 0
        self._trained = torch.zeros(total, len(fields), dtype=torch.float32, device=device)

    def put(self, indices: Sequence[int], values: Tensor) -> None:
        """Take down a micro-batch's values [T, fields].

        `indices` are those of its samples; fillers, which come last, have no trained tokens and so no values.
        """
        lengths = [self._samples[i].response_length for i in indices]
        for i, own in zip(indices, values.split(lengths), strict=True):
            self._trained[self._ends[i] - len(own) : self._ends[i]] = own

    def added(self, parallel: Parallel) -> list[Sample]:
        """Return the samples, in order, with the fields set: float32 [L] on the CPU, 0 on untrained tokens.

        All ranks must call it.
        """
        if not self._samples:
            return []
        mask = torch.cat([sample.loss_mask for sample in self._samples])
        flat = torch.zeros(len(mask), len(self._fields), dtype=torch.float32)
        flat[mask] = parallel.sum(self._trained).cpu()
        tables = flat.split([sample.token_ids.shape[0] for sample in self._samples])
        return [
            replace(sample, **dict(zip(self._fields, table.unbind(-1), strict=True)))
            for sample, table in zip(self._samples, tables, strict=True)
        ]
