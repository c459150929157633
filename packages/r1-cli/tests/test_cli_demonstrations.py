"""Batches of fine-tuning: rows that cannot be rendered are left out, up to a share of all."""

from collections.abc import Sequence

import pytest
import torch

from r1_cli.train.demonstrations import DemonstrationReader
from r1_data.types import DataError, Demonstration


class Rows:
    """Forty rows, of which some cannot be rendered."""

    def __init__(self, *unreadable: int) -> None:
        self.unreadable = unreadable

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> list[Demonstration]:
        if index in self.unreadable:
            raise DataError(f"row {index}: its picture is gone")
        return [Demonstration(f"row {index}", [1, 2], [False, True], torch.arange(2)[None])]

    def prefetch(self, indices: Sequence[int]) -> None: ...


def test_rows_that_cannot_be_rendered_are_left_out_and_counted_once_up_to_five_percent() -> None:
    reader = DemonstrationReader(Rows(3, 5, 39))
    for _ in range(2):
        batch = reader.read(range(8))
        assert batch.left_out == 2
        assert [one.id for one in batch.demonstrations] == [f"row {n}" for n in (0, 1, 2, 4, 6, 7)]
        assert [sample.group_id for sample in batch.samples] == list(range(6))
    with pytest.raises(DataError, match="3 of 40 rows cannot be read, more than 5%"):
        reader.read(range(32, 40))
