"""Which rows make up batch number `index`: a pure function of the seed.

A weighted batch of B prompts holds B·w_i of source i, w_i being its weight divided by the sum of weights. Fractions are
rounded at random with the exact mean (systematic sampling: source i gets the integers between
B·(w_1 + … + w_{i-1}) + u and B·(w_1 + … + w_i) + u, with one u in [0, 1) per batch). An exhausted source is reshuffled
and read again.

With levels, an epoch has only the rows that have one, those of lower levels first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, floor, isfinite
from operator import lt
from typing import Literal

from r1_data.types import DataError

Exhaustion = Literal["all_exhausted", "first_exhausted"]
Levels = Mapping[int, float]  # of the rows that are read, by row

_COUNTED = 10**6  # batches; the end of a longer epoch is estimated from the means
_SMALLEST = 1e-9  # share of a batch; below it, rounding decides whether a source is ever used


class Stream:
    """Endless batches of row indices, epoch after epoch, without state to checkpoint.

    An epoch sorts the rows by a hash of (seed, epoch, row), the same on every machine and version of every library, and
    drops the last partial batch. Without shuffling, an epoch continues where the previous one ended, so that every row
    is read. With `drop_last=False` the last batch of an epoch may be smaller, and an epoch is exactly all rows.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        drop_last: bool = True,
        levels: Levels | None = None,
    ) -> None:
        """Raises DataError if the rows do not fill one batch, or without rows."""
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        self._rows, self._levels = rows_of(size, levels), levels
        size = len(self._rows)
        if not drop_last:
            if size < 1:
                raise DataError("there are no rows")
        elif batch_size > size:
            raise DataError(f"a batch of {batch_size} prompts cannot be filled from {size} rows; lower the batch size")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.sizes = [size]
        self._drop_last = drop_last
        self.batches_per_epoch = size // batch_size if drop_last else -(-size // batch_size)
        self._order: tuple[int, list[int]] | None = None  # (epoch, its order): cached to sort once per epoch

    def batch(self, index: int, rank: int = 0, world: int = 1) -> list[int]:
        """Return the row indices of batch `index`, counted from 0 over all epochs: [batch_size], or a rank's shard."""
        epoch, position = divmod(require_index(index), self.batches_per_epoch)
        if self.shuffle or not self._drop_last:
            start = position * self.batch_size
            rows = self._epoch_order(epoch)[start : start + self.batch_size]
        else:
            start = index * self.batch_size
            rows = [self._rows[place % self.size] for place in range(start, start + self.batch_size)]
        return share(rows, rank, world)

    def quotas(self, index: int) -> list[int]:
        """Return the rows of a full batch by source, of which there is one."""
        return [self.batch_size]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            rows = shuffled(self._rows, f"{self.seed}:{epoch}", self._levels) if self.shuffle else list(self._rows)
            self._order = (epoch, rows)
        return self._order[1]


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
        levels: Sequence[Levels] | None = None,
    ) -> None:
        """`levels` are those of each source. Raises DataError if a source has no rows or no share of a batch."""
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        self._starts = [0, *accumulate(sizes)]
        self._levels: Sequence[Levels | None] = levels or [None] * len(sizes)
        self._rows = [rows_of(size, own) for size, own in zip(sizes, self._levels, strict=True)]
        sizes = list(map(len, self._rows))
        if not sizes or len(sizes) != len(weights) or min(sizes) < 1 or not all(weight > 0 for weight in weights):
            raise DataError(f"each source needs rows and a weight above 0, got sizes {sizes} and weights {weights}")
        if not isfinite(batch_size * sum(weights)) or min(weights) / sum(weights) < _SMALLEST:
            raise DataError(f"weights must be finite, each at least {_SMALLEST:g} of their sum, got {weights}")
        self.sizes, self.batch_size, self.seed, self.shuffle = sizes, batch_size, seed, shuffle
        self.size = sum(sizes)
        self._bounds = [batch_size * part / sum(weights) for part in accumulate(weights)]
        self._bounds[-1] = batch_size  # exactly, despite rounding
        self._drawn: tuple[int, list[int]] = (0, [0] * len(self.sizes))  # (batch, rows of each source before it)
        self._orders: dict[int, tuple[int, list[int]]] = {}  # source -> (latest epoch, its order)
        self.batches_per_epoch = self._epoch(until)

    def batch(self, index: int, rank: int = 0, world: int = 1) -> list[int]:
        before = self._drawn_before(require_index(index))
        rows = [
            self._starts[source] + self._row(source, position)
            for source, count in enumerate(self.quotas(index))
            for position in range(before[source], before[source] + count)
        ]
        if self.shuffle:
            rows = [rows[place] for place in shuffled(range(len(rows)), f"{self.seed}:places:{index}")]
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

    def quotas(self, index: int) -> list[int]:
        """Return the rows of a batch by source."""
        digest = hashlib.blake2b(f"{self.seed}:shares:{index}".encode(), digest_size=8).digest()
        offset = (int.from_bytes(digest, "big") >> 32) / 2**32  # in [0, 1), with few enough bits to add a bound exactly
        ends = [floor(bound + offset) for bound in self._bounds]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _drawn_before(self, index: int) -> list[int]:
        at, drawn = self._drawn if self._drawn[0] <= index else (0, [0] * len(self.sizes))
        for earlier in range(at, index):
            drawn = [total + count for total, count in zip(drawn, self.quotas(earlier), strict=True)]
        self._drawn = (index, drawn)
        return drawn

    def _row(self, source: int, position: int) -> int:
        epoch, place = divmod(position, self.sizes[source])
        if not self.shuffle:
            return self._rows[source][place]
        if source not in self._orders or self._orders[source][0] != epoch:
            key = f"{self.seed}:{source}:{epoch}"
            self._orders[source] = (epoch, shuffled(self._rows[source], key, self._levels[source]))
        return self._orders[source][1][place]


def rows_of(size: int, levels: Levels | None) -> Sequence[int]:
    """Return the rows that are read of `size`: those of lower levels first, each level's in order."""
    return range(size) if levels is None else sorted(sorted(levels), key=levels.__getitem__)


def shuffled(rows: Sequence[int], key: str, levels: Levels | None = None) -> list[int]:
    """Return the rows in an order that depends on `key` alone: by level, and at random within a level."""
    order = sorted(rows, key=lambda row: hashlib.blake2b(f"{key}:{row}".encode()).digest())
    return order if levels is None else sorted(order, key=levels.__getitem__)


def share(batch: list[int], rank: int, world: int) -> list[int]:
    """Return a rank's shard: contiguous, at most one row longer than another's.

    Shards of all ranks concatenate to the batch. Raises DataError unless 0 <= rank < world.
    """
    if not 0 <= rank < world:
        raise DataError(f"rank must be at least 0 and below world={world}, got {rank}")
    return batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]


def require_index(index: int) -> int:
    if index < 0:
        raise DataError(f"batch index must be at least 0, got {index}")
    return index
