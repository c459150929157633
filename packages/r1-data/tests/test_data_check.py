"""Tests of the check of rows: each kind of trouble is found, named by row, in one process or in several."""

import io
import subprocess
import sys

import pytest
from PIL import Image

from r1_data.check import Examiner, examine_all
from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.render import Renderer
from r1_data.types import DataError


class Rows(list):
    """Rows, of which some cannot be read."""

    def __getitem__(self, index):
        if super().__getitem__(index) is None:
            raise DataError(f"rows.jsonl:{index + 1}: not a JSON row")
        return f"rows.jsonl:{index + 1}", super().__getitem__(index)


def convert(row_id, row):
    return to_example(row_id, row, Columns("problem", "answer"))


def examiner(rows, processor, limit=400):
    return Examiner("data.train_files=rows.jsonl", Rows(rows), convert, Renderer(processor), limit)


def test_each_kind_of_trouble_is_told_by_row(processor, picture):
    whole = picture(60, 60)
    cut = whole[: len(whole) // 2]
    rows = [
        {"problem": "<image>?", "answer": "1", "images": [whole]},
        None,
        {"problem": "?", "solution": "1"},
        {"problem": "?", "answer": None},
        {"problem": "?", "answer": "  "},
        {"problem": " ", "answer": "1"},
        {"problem": "<image><image>?", "answer": "1", "images": [whole]},
        {"problem": "<image>?", "answer": "1", "images": [cut]},
        {"problem": 7, "answer": "1"},
        {"problem": "x" * 500, "answer": "1"},
    ]
    found = list(examine_all(lambda: [examiner(rows, processor)], [len(rows)], workers=1))
    assert [row.kind for row in found] == [
        "", "unreadable", "missing column", "empty", "empty", "empty", "markers", "media", "row", "overlong",
    ]  # fmt: skip
    assert all(f"rows.jsonl:{row.index + 1}: " in row.reason for row in found if row.kind)
    assert (found[0].media, found[0].answer) == (1, "1")
    assert found[9].tokens > 400


def test_rows_with_videos_are_examined_and_the_same_video_has_one_digest(processor, picture, movie, tmp_path):
    film, frames = movie(64, 48, 8, fps=4), [picture(56, 56), picture(60, 60)]
    (tmp_path / "film.mp4").write_bytes(film)
    videos = [film, str(tmp_path / "film.mp4"), frames[:1] * 2, [Image.open(io.BytesIO(frames[0]))] * 2, frames[:0]]
    rows = [{"problem": "<video>?", "answer": "1", "videos": [video]} for video in [*videos, film[:40], frames]]
    found = list(examine_all(lambda: [examiner(rows, processor, 4000)], [len(rows)], workers=1))
    assert [row.kind for row in found] == ["", "", "", "", "media", "media", "media"]
    assert found[0].digest == found[1].digest
    assert len({row.digest for row in found[:4]}) == 3  # pixels in memory are not compared with a file's bytes


def test_rows_that_ask_the_same_have_one_digest(processor, picture):
    first, second = picture(60, 60), picture(60, 61)
    rows = [
        {"problem": "<image>?", "answer": "1", "images": [first]},
        {"problem": "<image>?", "answer": "2", "images": [first]},
        {"problem": "<image>?", "answer": "1", "images": [second]},
        {"problem": "<image>!", "answer": "1", "images": [first]},
    ]
    digests = [row.digest for row in examine_all(lambda: [examiner(rows, processor)], [4], workers=1)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


DEADLY = """
import os, sys
from r1_data.check import Examiner, examine_all
from r1_data.formats import Columns
from r1_data.messages import to_example

class Rows(list):
    def __getitem__(self, index):
        if index == 41:
            os._exit(9)
        return f"deadly:{index + 1}", {"prompt": "?", "answer": "1"}

class Plain:
    def prompt_length(self, example):
        return 1

def convert(row_id, row):
    return to_example(row_id, row, Columns())

def open_all():
    return [Examiner("deadly", Rows([None] * 300), convert, Plain(), 100)]

if __name__ == "__main__":
    found = list(examine_all(open_all, [300], workers=2))
    assert [row.index for row in found] == list(range(300))
    print([row.reason for row in found if row.kind])
"""


def test_a_row_that_kills_its_worker_is_named_and_the_rest_goes_on(tmp_path):
    script = tmp_path / "deadly.py"
    script.write_text(DEADLY)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['deadly, row 42: the worker process died on it']", done.stderr


def test_what_cannot_be_opened_is_raised_where_it_was_asked_for():
    def fail():
        raise DataError("no such folder")

    with pytest.raises(DataError, match="no such folder"):
        list(examine_all(fail, [1000], workers=2))
