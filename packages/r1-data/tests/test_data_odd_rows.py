"""Each of the odd and broken inputs of `odd_rows` becomes what it should, in a check and in a data set."""

import re

import pytest
from odd_cases import Named, Read
from odd_rows import CASES

from r1_data.check import Inspector, SourceRows, examine_all
from r1_data.dataset import PromptDataset
from r1_data.messages import RowReader
from r1_data.render import Renderer
from r1_data.sources import read_rows
from r1_data.types import DataError

LIMIT = 3000  # tokens


@pytest.fixture(scope="module")
def renderer(processor):
    return Renderer(processor, min_pixels=28 * 28, max_pixels=56 * 56 * 4)


@pytest.mark.parametrize("name", CASES)
def test_it_is_read_named_or_refused_as_stated(renderer, tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    case = CASES[name]
    made = case.make(folder)
    reader = RowReader(image_dir=str(folder), source="odd")
    if not isinstance(case.expect, Read | Named):
        with pytest.raises(DataError) as caught:
            PromptDataset(read_rows(made), renderer, max_prompt_length=LIMIT, reader=reader, bad_rows="skip")
        assert re.search(case.expect.pattern, printable(caught.value)), caught.value
        return
    rows = read_rows(made) if isinstance(made, str) else made
    found = list(examine_all([SourceRows("odd", rows, reader)], Inspector(renderer, LIMIT)))
    assert len(found) == len(rows) == case.expect.rows
    if isinstance(case.expect, Named):
        check_named(case.expect, found, rows, renderer, reader)
    else:
        check_read(case.expect, found, rows, renderer, reader)


def check_named(expect, found, rows, renderer, reader):
    wrong = [row for row in found if row.kind]
    assert [row.index + 1 for row in wrong] == [expect.number if len(rows) > 1 else 1], wrong
    reason = printable(wrong[0].reason)
    assert re.search(rf":{expect.number}: .*({expect.pattern})", reason, re.DOTALL), reason
    assert len(reason) < 1000
    settings = {"max_prompt_length": LIMIT, "reader": reader, "bad_rows": "skip"}
    if len(rows) == 1:
        with pytest.raises(DataError, match="the dataset is empty"):
            PromptDataset(rows, renderer, **settings)
        return
    dataset = PromptDataset(rows, renderer, **settings)
    if wrong[0].kind == "overlong":
        assert dataset.summary.overlong == 1
    elif expect.taken:
        assert [printable(said) for said in dataset.summary.remarks] == [reason]
        assert dataset[expect.number - 1].id == wrong[0].id
    elif wrong[0].kind == "damage":  # shows when it is decoded
        with pytest.raises(DataError) as caught:
            dataset[expect.number - 1]
        assert printable(caught.value) == reason
    else:
        assert [printable(said) for said in dataset.summary.bad] == [reason]


def check_read(expect, found, rows, renderer, reader):
    assert not [row for row in found if row.kind]
    dataset = PromptDataset(rows, renderer, max_prompt_length=LIMIT, reader=reader)
    prompt = dataset[1]
    assert expect.text is None or expect.text in prompt.text
    assert expect.truth is None or prompt.ground_truth == expect.truth
    assert expect.pictures is None or len(prompt.images) == expect.pictures
    assert expect.videos is None or len(prompt.videos) == expect.videos
    assert expect.metadata is None or expect.metadata.items() <= dict(prompt.metadata).items()
    if expect.corner is not None:
        seen = prompt.images[0].getpixel((0, 0))
        assert max(abs(a - b) for a, b in zip(seen, expect.corner, strict=True)) <= 4, seen
    if expect.shape is not None:
        height, width = prompt.videos[0].shape[-2:] if prompt.videos else prompt.images[0].size[::-1]
        assert (height > width) == (expect.shape == "tall")


def printable(error):
    """What an error says, which a terminal can show."""
    text = str(error)
    text.encode("utf-8")
    return text
