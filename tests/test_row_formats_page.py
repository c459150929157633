"""Every example of docs/row-formats.md is read by r1's own reader, to what the page's tables say of it."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from code_blocks import Block, blocks_of
from endtoend import ROOT
from PIL import Image

from r1_data.conversations.reader import ConversationReader
from r1_data.formats import CONVERSATION_FORMATS, CONVERSATION_NAMES, NAMES, Columns, detect
from r1_data.messages import RowReader
from r1_data.references import pictures
from r1_data.sources import read_rows

PAGE = ROOT / "docs/row-formats.md"
BLOCKS = {str(block.title): block for block in blocks_of(PAGE) if block.title}
TABLES = [
    {
        cells[0]: cells[1:]
        for cells in re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.+?) \| (.+?) \| ?(.*?) ?\|$", part, re.M)
    }
    for part in PAGE.read_text("utf-8").split("\n## ")[1:]
]


def text_of(message: Any) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def read(block: Block, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write an example with its pictures; return its row as r1 reads it from the file."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (56, 56), "red").save(folder / name)
    (folder / str(block.title)).write_text(block.text)
    [(row_id, row)] = read_rows(str(folder / str(block.title)))
    return row_id, dict(row)


def test_every_example_is_in_a_table_and_every_format_has_an_example() -> None:
    training, tuning = TABLES
    assert {*training, *tuning} == {*BLOCKS}
    assert {cells[0] for cells in training.values()} == {*NAMES}
    assert {*CONVERSATION_NAMES} - {cells[0] for cells in tuning.values()} <= {"lmm_r1"}, "shown for r1 train"


@pytest.mark.parametrize("name", TABLES[0])
def test_a_training_row_is_read_as_the_page_says(name: str, tmp_path: Path) -> None:
    form, question, truth, media = TABLES[0][name]
    row_id, row = read(BLOCKS[name], tmp_path)
    assert detect(row, Columns()).format == form
    example = RowReader(image_dir=str(tmp_path))(row_id, row)
    assert text_of(example.messages[-1]) == question
    assert example.ground_truth == truth.strip("`")
    assert len(example.media) == int(media)
    for picture in pictures(example.media):
        Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture).verify()


@pytest.mark.parametrize("name", TABLES[1])
def test_a_row_for_fine_tuning_is_read_as_the_page_says(name: str, tmp_path: Path) -> None:
    form, question, answer, more = TABLES[1][name]
    row_id, row = read(BLOCKS[name], tmp_path)
    assert detect(row, Columns("messages", ""), formats=CONVERSATION_FORMATS).format == form
    wanted = "pairs" if more.startswith("rejected") else "labels" if more.startswith("label") else "answers"
    one = ConversationReader(image_dir=str(tmp_path), wanted=wanted)(row_id, row)
    asked = next(message for message in one.messages if message["role"] == "user")
    assert " ".join(text_of(asked).split()) == question
    assert text_of(one.messages[-1]) == answer.strip("`")
    found = [f"{len(one.tools)} tool"] if one.tools else []
    found += [f"{len(one.media)} media"] if one.media else []
    found += [f"rejected: {text_of(one.rejected[-1])}"] if one.rejected else []
    found += [f"label: {str(one.label).lower()}"] if one.label is not None else []
    assert ", ".join(found) == more
