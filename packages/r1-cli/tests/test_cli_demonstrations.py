"""Batches of fine-tuning: rows that cannot be rendered are left out, up to a share of all."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image

from r1_cli.train.demonstrations import DemonstrationBatch, DemonstrationReader, to_sample, to_table
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


PAD = 9  # a picture's placeholder


def test_the_record_shows_pictures_and_one_placeholder_of_each() -> None:
    tokenizer = SimpleNamespace(
        decode=lambda token_ids: " ".join(map(str, token_ids)),
        added_tokens_decoder={PAD: SimpleNamespace(special=True), 4: SimpleNamespace(special=False)},
    )
    token_ids, mask = [4, 4, PAD, PAD, PAD, 3, PAD, PAD, 5, 5], [False] * 8 + [True] * 2
    pictures = tuple(Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (1, 2))
    one = Demonstration("row", token_ids, mask, torch.arange(10)[None], prompt_length=8, images=pictures)
    sample = replace(to_sample(one, 0), old_logprobs=torch.full((10,), -0.5))
    names: list[str] = []

    def save(shown: Demonstration) -> list[str]:
        names.extend(f"{picture.getpixel((0, 0))}" for picture in shown.images)
        return names

    [row] = to_table(1, DemonstrationBatch([one], [sample]), cast(Any, tokenizer), save).to_pylist()
    assert row["media"] == ["(1, 0, 0)", "(2, 0, 0)"]
    assert row["prompt"] == f"4 4 {PAD} 3 {PAD}"
    assert (row["prompt_tokens"], row["answer"], row["score"]) == (token_ids[:8], "5 5", -0.5)
