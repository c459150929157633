"""Tests of known lengths: remembered over runs, forgotten when anything changes that decides them."""

import sqlite3

import pytest

import r1_data.dataset
from r1_data.dataset import PromptDataset
from r1_data.formats import Columns
from r1_data.lengths import KnownLengths
from r1_data.messages import RowReader, to_example
from r1_data.render import Renderer
from r1_data.types import DataError


@pytest.fixture(autouse=True)
def _remember_few(monkeypatch):
    monkeypatch.setattr(r1_data.dataset, "MANY", 1)


class Counting(Renderer):
    """A renderer that counts how many examples it has measured."""

    measured = 0

    def measure(self, examples, *limit):
        self.measured += len(examples)
        return super().measure(examples, *limit)


def text_rows(*prompts: str) -> list[tuple[str, dict]]:
    return [(f"t:{number}", {"prompt": prompt, "answer": "1"}) for number, prompt in enumerate(prompts, start=1)]


def measured(rows, renderer, folder, **settings) -> int:
    renderer.measured = 0
    PromptDataset(rows, renderer, max_prompt_length=2000, known_lengths=folder, reader=RowReader(**settings))
    return renderer.measured


def test_rows_are_measured_once_and_only_new_ones_again(tokenizer, tmp_path):
    renderer = Counting(tokenizer)
    assert measured(text_rows("a", "bb"), renderer, tmp_path) == 2
    assert measured(text_rows("a", "bb", "a"), Counting(tokenizer), tmp_path) == 0
    assert measured(text_rows("ccc", "a", "bb"), Counting(tokenizer), tmp_path) == 1
    assert measured(text_rows("a"), Counting(tokenizer), tmp_path, system_prompt="Think.") == 1


def test_a_prompt_that_is_only_known_to_be_over_the_limit_is_measured_again_under_another_limit(tokenizer, tmp_path):
    rows = text_rows("x" * 100_000)
    with pytest.raises(DataError, match="all 1 rows were filtered out"):
        PromptDataset(rows, Renderer(tokenizer), max_prompt_length=200, known_lengths=tmp_path)
    dataset = PromptDataset(rows, Renderer(tokenizer), max_prompt_length=200_000, known_lengths=tmp_path)
    assert dataset.summary.longest == len(dataset[0].token_ids) > 100_000


def test_known_lengths_give_the_same_summary(tokenizer, tmp_path):
    rows = text_rows("a", "b" * 300, "cc")
    first, second, fresh = (
        PromptDataset(rows, Renderer(tokenizer), max_prompt_length=100, known_lengths=folder).summary
        for folder in (tmp_path, tmp_path, None)
    )
    assert first == second == fresh


def test_whatever_decides_a_length_is_part_of_what_it_is_known_by(fresh_processor, picture, movie, tmp_path):
    (tmp_path / "x.png").write_bytes(picture(60, 40))
    images = [{"prompt": "<image>?", "answer": "1", "images": [cell]} for cell in ("x.png", picture(60, 40))]
    row = [
        (f"t:{n}", one) for n, one in enumerate([*images, {"prompt": "?", "answer": "1", "videos": [movie(32, 32, 4)]}])
    ]
    settings = {"image_dir": str(tmp_path)}
    variants = [
        Counting(fresh_processor("qwen2_vl")),
        Counting(fresh_processor("qwen3_vl")),
        Counting(fresh_processor("qwen2_vl"), max_pixels=28 * 28 * 9),
        Counting(fresh_processor("qwen2_vl"), video_max_pixels=10**6),
        Counting(fresh_processor("qwen2_vl"), chat_template_kwargs={"thinking": True}),
        Counting(fresh_processor("qwen2_vl"), chat_template=fresh_processor("qwen2_vl").chat_template + " "),
    ]
    for renderer in variants:
        assert measured(row, renderer, tmp_path / "known", **settings) == 3
        assert measured(row, renderer, tmp_path / "known", **settings) == 0
    (tmp_path / "x.png").write_bytes(picture(90, 40))
    assert measured(row, variants[0], tmp_path / "known", **settings) == 1


def test_rows_that_cannot_be_used_are_looked_at_every_time(processor, picture, tmp_path):
    rows = [("t:1", {"prompt": "<image>?", "answer": "1", "images": ["x.png"]})]
    with pytest.raises(DataError, match="no such file"):
        measured(rows, Counting(processor), tmp_path, image_dir=str(tmp_path))
    (tmp_path / "x.png").write_bytes(picture(60, 40))
    assert measured(rows, Counting(processor), tmp_path, image_dir=str(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_only_time(tokenizer, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert measured(text_rows("a"), Counting(tokenizer), tmp_path / "file") == 1
    assert "will not be remembered" in caplog.text
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "lengths.sqlite").write_bytes(b"this is no database" * 99)
    assert measured(text_rows("a"), Counting(tokenizer), tmp_path / "broken") == 1


def test_the_file_of_lengths_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr("r1_data.lengths._MOST", 5)
    for start in (0, 6):
        known = KnownLengths(tmp_path / "k.sqlite", "f")
        for number in range(start, start + 6):
            known.put(bytes([number]), number)
        known.close()
    keys = sqlite3.connect(tmp_path / "k.sqlite").execute("SELECT key FROM lengths").fetchall()
    assert sorted(keys) == [(bytes([number]),) for number in range(7, 12)]


def test_media_that_may_change_unseen_are_known_by_nothing(tmp_path):
    known = KnownLengths(tmp_path / "k.sqlite", "f")
    example = to_example("t:1", {"prompt": "?", "answer": "1", "images": ["gone.png"]}, Columns())
    assert known.key(example) is None
    known.close()
