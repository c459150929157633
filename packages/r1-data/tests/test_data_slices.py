"""Tests of slices, revisions and names of sources, and of several sources opened together."""

import json

import pytest

from r1_data.sources import count_rows, read_rows, read_sources
from r1_data.tables.spec import Slice, answers_per_prompt, name_source, split_slice
from r1_data.types import DataError


def write(path, rows=10, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"{path.stem} {i}", "answer": str(i), **columns}) for i in range(1, rows + 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def numbers(rows):
    return [int(row_id.rsplit(":", 1)[1]) for row_id, _ in rows]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[:4]", [1, 2, 3, 4]),
        ("[8:]", [9, 10]),
        ("[-2:]", [9, 10]),
        ("[2:4]", [3, 4]),
        ("[10%:30%]", [2, 3]),
        ("[:25%]", [1, 2]),
        ("[-20%:]", [9, 10]),
        ("[:1000]", list(range(1, 11))),
        ("[:]", list(range(1, 11))),
    ],
)
def test_a_slice_takes_rows_that_keep_their_numbers(tmp_path, text, expected):
    spec = f"{write(tmp_path / 'train.jsonl')}{text}"
    assert numbers(read_rows(spec)) == expected
    assert count_rows(spec) == len(expected)


def test_a_slice_of_a_folder_goes_over_its_files_as_one(tmp_path):
    for part in ("train-1", "train-2", "train-3"):
        write(tmp_path / f"{part}.jsonl", rows=4)
    rows = read_rows(f"{tmp_path}@train[3:9]")
    assert [row_id.removeprefix("train-") for row_id, _ in rows] == [
        "1.jsonl:4", "2.jsonl:1", "2.jsonl:2", "2.jsonl:3", "2.jsonl:4", "3.jsonl:1",
    ]  # fmt: skip
    assert len(read_rows(f"json@{tmp_path}[:50%]")) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1000]", "a slice is written"),
        ("[:1e3]", "a slice is written"),
        ("[:101%]", "101% is more than all rows"),
        ("[20:]", r"the slice \[20:\] holds none of the 10 rows"),
        ("[5:5]", "holds none of the 10 rows"),
    ],
)
def test_slices_that_cannot_be_taken_are_named(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_rows(f"{write(tmp_path / 'train.jsonl')}{text}")


def test_a_file_whose_name_ends_in_brackets_is_a_file(tmp_path):
    assert len(read_rows(str(write(tmp_path / "odd[1:2]").rename(tmp_path / "odd[1:2].jsonl")))) == 10


def test_hub_names_are_read_with_configuration_revision_and_split(monkeypatch):
    import r1_data.sources as sources

    asked = []

    class Recorded:
        def __init__(self, *arguments):
            asked.append(arguments)

        def __len__(self):
            return 100

        def __getitem__(self, index):
            return index + 1, {}

    monkeypatch.setattr(sources, "open_hub", Recorded)
    rows = read_rows(["owner/set:main#refs/pr/2@test[:10%]", "owner/other"])
    assert asked == [("owner/set", "main", "test", "refs/pr/2"), ("owner/other", None, "train", None)]
    assert (len(rows), rows[9][0], rows[10][0]) == (110, "owner/set:main#refs/pr/2@test:10", "owner/other@train:1")


def test_slices_of_one_file_are_told_apart_and_the_same_twice_is_refused(tmp_path):
    path = write(tmp_path / "train.jsonl")
    first, second = read_sources([f"{path}[:2]", f"{path}[5:6]"])
    assert [first[0][0], second[0][0]] == ["train.jsonl[:2]:1", "train.jsonl[5:6]:6"]
    with pytest.raises(DataError, match="given twice"):
        read_sources([str(path), str(path)])


def test_row_ids_differ_over_all_sources(tmp_path):
    files = [str(write(tmp_path / folder / "train.jsonl")) for folder in ("a", "b")]
    opened = read_sources([files[0], [files[1]]])
    assert [rows[0][0] for rows in opened] == ["a/train.jsonl:1", "b/train.jsonl:1"]


def test_split_slice_leaves_other_names_alone():
    assert split_slice("owner/name@train") == ("owner/name@train", None)
    assert split_slice("owner/name@train[10%:]") == ("owner/name@train", Slice("10%", ""))


@pytest.mark.parametrize(
    ("spec", "name", "answers"),
    [
        ("data/AIME2024_Avg16.parquet", "AIME2024_Avg16", 16),
        ("data/AIME2024_Avg16.parquet[:10]", "AIME2024_Avg16", 16),
        ("data/Minerva_Avg4@test", "Minerva_Avg4", 4),
        ("openai/gsm8k:main#v1@train[:100]", "gsm8k", None),
        ("json@./geo", "geo", None),
        ("train.jsonl", "train", None),
        ("Average5.jsonl", "Average5", None),
    ],
)
def test_names_tell_what_a_source_is_called_and_how_often_it_is_answered(spec, name, answers):
    assert (name_source(spec), answers_per_prompt(spec)) == (name, answers)
