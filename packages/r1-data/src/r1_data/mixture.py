"""Several sources as one: concatenated prompts, and batches with a weighted share of each source.

A batch of B prompts holds B·w_i of source i, w_i being its weight divided by the sum of weights. Fractions are rounded
at random with the exact mean (systematic sampling: source i gets the integers between B·(w_1 + … + w_{i-1}) + u and
B·(w_1 + … + w_i) + u, with one u in [0, 1) per batch). An exhausted source is reshuffled
and read again.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, floor, isfinite
from operator import lt
from typing import Literal

from r1_data.dataset import PromptDataset
from r1_data.prefetch import PromptMemory, RenderJob
from r1_data.stream import require_index, share, shuffled
from r1_data.types import DataError, Prompt

Exhaustion = Literal["all_exhausted", "first_exhausted"]

_COUNTED = 10**6  # batches; the end of a longer epoch is estimated from the means
_SMALLEST = 1e-9  # share of a batch; below it, rounding decides whether a source is ever used


class Mixture:
    def __init__(self, parts: Sequence[PromptDataset]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Prompt:
        which, own = self._place(index)
        return self.parts[which][own]

    def prefetch(self, indices: Iterable[int]) -> None:
        planned: dict[PromptMemory, list[RenderJob]] = {part.memory: [] for part in self.parts}
        for index in indices:
            which, own = self._place(index)
            if self.parts[which].renders_ahead:
                planned[self.parts[which].memory].append(self.parts[which].job(own))
        for memory, jobs in planned.items():
            memory.prefetch(jobs)

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        return which, index - self._ends[which] + len(self.parts[which])


class WeightedStream:
    """Endless batches of row indices of a `Mixture`; a pure function of (seed, batch number).

    An epoch, which only determines how long a run lasts, ends when every source has been read once (`all_exhausted`) or
    the first one has (`first_exhausted`).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        until: Exhaustion = "all_exhausted",
    ) -> None:
        """Raises DataError if a source has no rows or no share of a batch."""
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        if not sizes or len(sizes) != len(weights) or min(sizes) < 1 or not all(weight > 0 for weight in weights):
            raise DataError(f"each source needs rows and a weight above 0, got sizes {sizes} and weights {weights}")
        if not isfinite(batch_size * sum(weights)) or min(weights) / sum(weights) < _SMALLEST:
            raise DataError(f"weights must be finite, each at least {_SMALLEST:g} of their sum, got {weights}")
        self.sizes, self.batch_size, self.seed, self.shuffle = list(sizes), batch_size, seed, shuffle
        self.size = sum(sizes)
        self._starts = [0, *accumulate(sizes)]
        self._bounds = [batch_size * part / sum(weights) for part in accumulate(weights)]
        self._bounds[-1] = batch_size  # exactly, despite rounding
        self._drawn: tuple[int, list[int]] = (0, [0] * len(self.sizes))  # (batch, rows of each source before it)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # source -> (latest epoch, its order)
        self.batches_per_epoch = self._epoch(until)

    def batch(self, index: int, rank: int = 0, world: int = 1) -> list[int]:
        before = self._drawn_before(require_index(index))
        rows = [
            self._starts[source] + self._row(source, position)
            for source, count in enumerate(self._counts(index))
            for position in range(before[source], before[source] + count)
        ]
        if self.shuffle:
            rows = [rows[place] for place in shuffled(len(rows), f"{self.seed}:places:{index}")]
        return share(rows, rank, world)

    def _epoch(self, until: Exhaustion) -> int:
        shares = [high - low for low, high in zip([0.0, *self._bounds], self._bounds, strict=False)]
        needed = [size / portion for size, portion in zip(self.sizes, shares, strict=True)]
        if until == "first_exhausted":
            return max(1, floor(min(needed) + 1e-9))
        batches = ceil(max(needed) - 1e-9)
        while batches < _COUNTED and any(map(lt, self._drawn_before(batches), self.sizes)):
            batches += 1  # rounding may have given a source less than its share so far
        return batches

    def _counts(self, index: int) -> list[int]:
        digest = hashlib.blake2b(f"{self.seed}:shares:{index}".encode(), digest_size=8).digest()
        offset = (int.from_bytes(digest, "big") >> 32) / 2**32  # in [0, 1), with few enough bits to add a bound exactly
        ends = [floor(bound + offset) for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _drawn_before(self, index: int) -> list[int]:
        at, drawn = self._drawn if self._drawn[0] <= index else (0, [0] * len(self.sizes))
        for earlier in range(at, index):
            drawn = [total + count for total, count in zip(drawn, self._counts(earlier), strict=True)]
        self._drawn = (index, drawn)
        return drawn

    def _row(self, source: int, position: int) -> int:
        epoch, place = divmod(position, self.sizes[source])
        if not self.shuffle:
            return place
        if source not in self._orders or self._orders[source][0] != epoch:
            self._orders[source] = (epoch, shuffled(self.sizes[source], f"{self.seed}:{source}:{epoch}"))
        return self._orders[source][1][place]
