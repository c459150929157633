"""The order of the prompts: which rows make up batch number `index`, as a pure function of the seed."""

import hashlib

from r1_data.types import DataError


class Stream:
    """Endless batches of row indices, epoch after epoch; nothing needs saving to resume.

    The order of an epoch sorts the rows by a hash of (seed, epoch, row), so it is the same on every machine and with
    every version of every library; the last partial batch of an epoch is dropped, and another order gives its rows
    their turn. Without shuffling one epoch goes on where the one before it ended, so that no row is left out for ever.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        """`size` rows, `batch_size` rows a batch. Raises DataError when not even one batch fits."""
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        if batch_size > size:
            raise DataError(f"a batch of {batch_size} prompts cannot be filled from {size} rows; lower the batch size")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.batches_per_epoch = size // batch_size
        self._order: tuple[int, list[int]] | None = None  # (epoch, its order): the latest, to sort once an epoch

    def batch(self, index: int, rank: int = 0, world: int = 1) -> list[int]:
        """The row indices of batch `index`, counted from 0 over all epochs; [batch_size].

        Of `world` readers the one of `rank` gets its share, see `share`.
        """
        epoch, position = divmod(require_index(index), self.batches_per_epoch)
        if self.shuffle:
            start = position * self.batch_size
            rows = self._epoch_order(epoch)[start : start + self.batch_size]
        else:
            start = index * self.batch_size
            rows = [place % self.size for place in range(start, start + self.batch_size)]
        return share(rows, rank, world)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, shuffled(self.size, f"{self.seed}:{epoch}"))
        return self._order[1]


def shuffled(size: int, key: str) -> list[int]:
    """The numbers below `size` in an order that depends on `key` alone, whatever the machine or the libraries."""
    return sorted(range(size), key=lambda row: hashlib.blake2b(f"{key}:{row}".encode()).digest())


def share(batch: list[int], rank: int, world: int) -> list[int]:
    """One reader's part of a batch: contiguous, and at most one row longer than another's.

    The parts of ranks 0 to world - 1, one after the other, are the batch: readers agree whatever their number.
    Raises DataError for a rank that is not below `world`.
    """
    if not 0 <= rank < world:
        raise DataError(f"rank must be at least 0 and below world={world}, got {rank}")
    return batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]


def require_index(index: int) -> int:
    if index < 0:
        raise DataError(f"batch index must be at least 0, got {index}")
    return index
