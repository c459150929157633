"""The order of the prompts: which rows make up batch number `index`, as a pure function of the seed."""

import hashlib

from r1_data.types import DataError


class Stream:
    """Endless batches of row indices, epoch after epoch; nothing needs saving to resume.

    The order of an epoch sorts the rows by a hash of (seed, epoch, row), so it is the same on every machine and with
    every version of every library. The last partial batch of an epoch is dropped.
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

    def batch(self, index: int) -> list[int]:
        """The row indices of batch `index`, counted from 0 over all epochs; [batch_size]."""
        if index < 0:
            raise DataError(f"batch index must be at least 0, got {index}")
        epoch, position = divmod(index, self.batches_per_epoch)
        start = position * self.batch_size
        return self._epoch_order(epoch)[start : start + self.batch_size]

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            rows = list(range(self.size))
            if self.shuffle:
                rows.sort(key=lambda row: hashlib.blake2b(f"{self.seed}:{epoch}:{row}".encode()).digest())
            self._order = (epoch, rows)
        return self._order[1]
