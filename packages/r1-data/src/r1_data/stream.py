"""Which rows make up batch number `index`: a pure function of the seed."""

import hashlib

from r1_data.types import DataError


class Stream:
    """Endless batches of row indices, epoch after epoch, without state to checkpoint.

    An epoch sorts the rows by a hash of (seed, epoch, row), the same on every machine and version of every library, and
    drops the last partial batch. Without shuffling, an epoch continues where the previous one ended, so that every row
    is read.
    """

    def __init__(self, size: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        """Raises DataError if `size` rows do not fill one batch."""
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}")
        if batch_size > size:
            raise DataError(f"a batch of {batch_size} prompts cannot be filled from {size} rows; lower the batch size")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.batches_per_epoch = size // batch_size
        self._order: tuple[int, list[int]] | None = None  # (epoch, its order): cached to sort once per epoch

    def batch(self, index: int, rank: int = 0, world: int = 1) -> list[int]:
        """Return the row indices of batch `index`, counted from 0 over all epochs: [batch_size], or a rank's shard."""
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
    """Return the numbers below `size` in an order that depends on `key` alone."""
    return sorted(range(size), key=lambda row: hashlib.blake2b(f"{key}:{row}".encode()).digest())


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
