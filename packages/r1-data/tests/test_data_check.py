"""Tests of the check of rows: each kind of trouble is found, named by row, in one process or in several."""

import io
from contextlib import closing

import pytest
from data_targets import MEGABYTE, Stub
from patience import growing
from PIL import Image

from r1_data.check import Inspector, SourceRows, examine_all
from r1_data.formats import Columns
from r1_data.lengths import KnownLengths
from r1_data.messages import to_example
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_data.workers import Workers


class Rows(list):
    """Rows, of which some cannot be read."""

    def __getitem__(self, index):
        if super().__getitem__(index) is None:
            raise DataError(f"rows.jsonl:{index + 1}: not a JSON row")
        return f"rows.jsonl:{index + 1}", super().__getitem__(index)


def convert(row_id, row):
    return to_example(row_id, row, Columns("problem", "answer"))


def examine(rows, renderer, limit=400, **others):
    source = SourceRows("data.train_files=rows.jsonl", Rows(rows), convert)
    return list(examine_all([source], Inspector(renderer, limit), **others))


def test_each_kind_of_trouble_is_told_by_row(processor, picture):
    whole = picture(60, 60)
    cut, damaged = whole[: len(whole) // 2], bytearray(picture(300, 300))
    damaged[len(damaged) // 2] ^= 0xFF  # header and end are whole
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
        {"problem": "<image>?", "answer": "1", "images": [bytes(damaged)]},
        {"problem": "<|image_pad|>?", "answer": "1"},
    ]
    found = examine(rows, Renderer(processor))
    assert [row.kind for row in found] == [
        "", "unreadable", "missing column", "empty", "blank answer", "blank", "markers", "media", "row", "overlong",
        "damage", "prompt",
    ]  # fmt: skip
    assert all(f"rows.jsonl:{row.index + 1}: " in row.reason for row in found if row.kind)
    assert (found[0].media, found[0].ground_truth) == (1, "1")
    assert found[9].tokens > 400


def test_rows_with_videos_are_examined_and_the_same_video_has_one_digest(processor, picture, movie, tmp_path):
    film, frames = movie(64, 48, 8, fps=4), [picture(56, 56), picture(60, 60)]
    (tmp_path / "film.mp4").write_bytes(film)
    videos = [film, str(tmp_path / "film.mp4"), frames[:1] * 2, [Image.open(io.BytesIO(frames[0]))] * 2, frames[:0]]
    rows = [{"problem": "<video>?", "answer": "1", "videos": [video]} for video in [*videos, film[:40], frames]]
    found = examine(rows, Renderer(processor), 4000)
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
    digests = [row.digest for row in examine(rows, Renderer(processor))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("crash", r"its worker process ended by itself (exit code 7)"),
        ("hang", "it took longer than"),
        ("swell", "it needs more than 314,572,800 bytes of memory"),
    ],
)
def test_media_that_break_a_worker_are_named_and_the_rest_goes_on(act, reason):
    rows = [{"problem": "<image>?", "answer": "1", "images": [b"picture"]} for _ in range(9)]
    rows[5]["problem"] = f"<image>{act}"
    rows[2] = None

    def look(seconds):
        with Workers(Inspector(Stub(), 400), 1, memory_bytes=300 * MEGABYTE, seconds=seconds) as workers:
            return list(examine(rows, Stub(), workers=workers))

    def only_one(found):
        return {row.index: row.kind for row in found if row.kind} == {2: "unreadable", 5: "crash"}

    found = growing(look, only_one, (2.0, 20.0, 60.0) if act == "hang" else (120.0,))
    assert [row.index for row in found] == list(range(9))
    assert only_one(found)
    assert found[5].reason.startswith(f"rows.jsonl:6: {reason}")
    assert [found[0].tokens, found[8].tokens] == [10, 10]


def test_a_huge_prompt_is_overlong_and_its_tokens_are_not_counted(processor):
    (found,) = examine([{"problem": "x" * 200_000, "answer": "1"}], Renderer(processor))
    assert (found.kind, found.tokens) == ("overlong", None)
    assert found.reason.startswith("rows.jsonl:1: the prompt has 200,050 characters and at least ")


def test_workers_find_the_same_as_one_process(processor, picture, monkeypatch):
    monkeypatch.setattr("r1_data.check.MANY_TEXTS", 1)
    rows = [{"problem": f"<image>{i}", "answer": "1", "images": [picture(60, 60 + i)]} for i in range(7)]
    rows += [None, *({"problem": "?" * i, "answer": "1"} for i in (*range(90), 70_000))]
    rows += [{"problem": "<image>?", "answer": "1", "images": ["missing.png"]}]
    renderer = Renderer(processor)
    with Workers(Inspector(renderer, 80), 1) as workers:
        assert examine(rows, renderer, 80, workers=workers) == examine(rows, renderer, 80)


class Counting(Inspector):
    """An inspector that counts the examples it has looked at."""

    looked = 0

    def inspect(self, examples):
        self.looked += len(examples)
        return super().inspect(examples)


def test_sound_rows_are_looked_at_once_and_broken_ones_every_time(processor, picture, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(60, 60))
    damaged = bytearray(picture(300, 300))
    damaged[len(damaged) // 2] ^= 0xFF
    cells = [str(tmp_path / "a.png"), picture(60, 60), bytes(damaged)]
    rows = [{"problem": "<image>?", "answer": "1", "images": [cell]} for cell in cells]
    rows += [{"problem": "text", "answer": "1"}, {"problem": "x" * 500, "answer": "1"}]
    source, renderer = SourceRows("s", Rows(rows), convert), Renderer(processor)

    def run(limit=400):
        inspector = Counting(renderer, limit)
        with closing(KnownLengths(tmp_path / "known.sqlite", renderer.fingerprint())) as known:
            return list(examine_all([source], inspector, known=known)), inspector.looked

    first, looked = run()
    assert ([row.kind for row in first], looked) == (["", "", "damage", "", "overlong"], 5)
    again, looked = run()
    assert (again, looked) == (first, 1)
    (tmp_path / "a.png").write_bytes(picture(80, 60))
    assert run()[1] == 2
    assert [row.kind for row in run(limit=600)[0]] == ["", "", "damage", "", ""]


def test_a_check_saves_the_run_its_measuring(processor, picture, tmp_path):
    example = convert("t:1", {"problem": "<image>?", "answer": "1", "images": [picture(60, 60)]})
    renderer = Renderer(processor)
    with closing(KnownLengths(tmp_path / "known.sqlite", renderer.fingerprint())) as known:
        (found,) = examine_all(
            [SourceRows("s", [("t:1", {})], lambda *_: example)], Inspector(renderer, 400), known=known
        )
        assert known.get(known.key(example)) == found.tokens


def test_bad_examples_of_a_chunk_do_not_shift_the_results_of_others(processor):
    rows = [{"problem": "?" * number, "answer": "1"} if number % 3 else None for number in range(40)]
    found = examine(rows, Renderer(processor))
    lengths = [row.tokens for row in found if row.tokens]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == 26
