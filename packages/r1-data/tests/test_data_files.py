"""Tests of files and sources: every kind of file and spec, row ids, and what is said about broken ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from r1_data.sources import count_rows, read_rows
from r1_data.tables.arrow import open_hub
from r1_data.tables.table import Rows
from r1_data.types import DataError, Overlong

ROWS = [{"problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(3)]


def write(path: Path, rows: list[dict] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        lines = ["problem,answer", *(f'"{row["problem"]}",{row["answer"]}' for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_gives_the_same_rows_with_ids_counted_from_one(tmp_path, suffix):
    path = write(tmp_path / f"train{suffix}")
    assert list(read_rows(str(path))) == [(f"train{suffix}:{i + 1}", row) for i, row in enumerate(ROWS)]
    assert count_rows(str(path)) == 3


def test_json_file_with_a_row_a_line_is_read_as_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    assert [row for _, row in read_rows(str(path))] == ROWS


def test_blank_lines_are_no_rows_and_ids_are_line_numbers(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": "\xc3\xa9"}')
    assert list(read_rows(str(path))) == [("train.jsonl:1", {"a": 1}), ("train.jsonl:4", {"a": "é"})]
    assert count_rows(str(path)) == 2


def test_csv_values_stay_text_and_quoted_fields_may_hold_newlines(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('problem,answer\n"two\nlines",007\nx,1e3\n')
    assert [row for _, row in read_rows(str(path))] == [
        {"problem": "two\nlines", "answer": "007"},
        {"problem": "x", "answer": "1e3"},
    ]
    assert count_rows(str(path)) == 2


def test_parquet_pictures_arrive_as_the_stored_bytes(tmp_path, picture):
    data = picture(8, 8)
    path = write(tmp_path / "t.parquet", [{"images": [{"bytes": data, "path": None}]}])
    assert read_rows(str(path))[0][1]["images"][0]["bytes"] == data


def test_rows_is_a_sequence_over_several_files(tmp_path):
    rows = read_rows([str(write(tmp_path / "a.jsonl")), str(write(tmp_path / "b.csv"))])
    assert isinstance(rows, Rows)
    assert len(rows) == 6
    assert [row_id for row_id, _ in rows[2:5]] == ["a.jsonl:3", "b.csv:1", "b.csv:2"]
    assert rows[-1] == ("b.csv:3", ROWS[2])
    with pytest.raises(IndexError):
        rows[6]


def test_files_of_the_same_name_get_longer_labels(tmp_path):
    rows = read_rows([str(write(tmp_path / "x" / "train.jsonl")), str(write(tmp_path / "y" / "train.jsonl"))])
    assert [rows[0][0], rows[3][0]] == ["x/train.jsonl:1", "y/train.jsonl:1"]
    assert len({row_id for row_id, _ in rows}) == 6


def test_a_file_given_twice_is_refused(tmp_path):
    path = str(write(tmp_path / "train.jsonl"))
    with pytest.raises(DataError, match="given twice"):
        read_rows([path, path])


@pytest.mark.parametrize(
    ("files", "spec", "expected"),
    [
        (["part-1.jsonl", "part-2.jsonl"], "{d}", ["part-1.jsonl", "part-2.jsonl"]),
        (["part-1.jsonl", "part-2.jsonl"], "{d}@train", ["part-1.jsonl", "part-2.jsonl"]),
        (["train-0.jsonl", "test-0.jsonl"], "{d}", ["train-0.jsonl"]),
        (["train-0.jsonl", "test-0.jsonl"], "{d}@test", ["test-0.jsonl"]),
        (["data/train-0.jsonl", "data/val.jsonl"], "{d}@validation", ["val.jsonl"]),
        (["data/train-0.jsonl", "data/validation.jsonl"], "{d}@val", ["validation.jsonl"]),
        (["train/0.jsonl", "test/0.jsonl"], "{d}@test", ["0.jsonl"]),
        (["easy.jsonl", "hard.jsonl"], "{d}@hard", ["hard.jsonl"]),
        (["test.json", "train.csv", "more/train.json"], "json@{d}", ["train.json", "test.json"]),
        (["train.parquet", "dataset_info.json", ".cache/x.json"], "{d}", ["train.parquet"]),
    ],
)
def test_folders_give_the_files_of_the_split(tmp_path, files, spec, expected):
    for name in files:
        write(tmp_path / name)
    rows = read_rows(spec.format(d=tmp_path))
    assert [row_id.rsplit(":", 1)[0] for row_id, _ in rows][::3] == expected
    assert count_rows(spec.format(d=tmp_path)) == len(rows)


def test_count_agrees_with_reading_a_real_mixture(tmp_path):
    spec = [str(write(tmp_path / name)) for name in ("a.json", "b.jsonl", "c.csv", "d.parquet")]
    assert count_rows(spec) == len(read_rows(spec)) == 12


@pytest.mark.parametrize("spec", ["someone/dataset@train", "someone/dataset", "gsm8k:main@test", ["a/b@train[:10]"]])
def test_hub_names_are_not_counted(spec):
    assert count_rows(spec) is None


def test_hub_table_reads_through_datasets_and_leaves_pictures_encoded(tmp_path, picture):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"answer": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())})
    source = datasets.Dataset.from_dict({"answer": ["1", "2"], "images": [[picture(9, 7)], []]}, features=features)
    source.to_parquet(tmp_path / "data" / "test-0.parquet")
    table = open_hub(str(tmp_path / "data"), None, "test")
    assert len(table) == 2
    number, row = table[0]
    assert (number, row["answer"], row["images"][0]["bytes"]) == (1, "1", picture(9, 7))


def test_hub_split_that_is_not_there_is_a_data_error(tmp_path):
    write(tmp_path / "data" / "train.jsonl")
    with pytest.raises(DataError, match="split 'nope'"):
        open_hub(str(tmp_path / "data"), None, "nope")


def test_hub_data_that_does_not_parse_is_a_data_error(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be loaded"):
        open_hub(str(tmp_path / "data"), None, "train")


def test_missing_file_names_path_working_directory_and_near_names(tmp_path, monkeypatch):
    write(tmp_path / "data" / "train.jsonl")
    monkeypatch.chdir(tmp_path)
    for read in (read_rows, count_rows):
        with pytest.raises(DataError) as caught:
            read("data/trian.jsonl")
        assert all(part in str(caught.value) for part in ("data/trian.jsonl", str(tmp_path), "data/train.jsonl?"))


@pytest.mark.parametrize(
    ("name", "content", "spec", "message"),
    [
        ("train.txt", "hello", "{d}/train.txt", "'.txt' are not read; use json, jsonl, parquet, csv"),
        ("t.jsonl", '{"a": 1}\n{"a": \n', "{d}/t.jsonl", r"t\.jsonl:2: not a JSON row"),
        ("t.jsonl", '{"a": 1}\n[1]\n', "{d}/t.jsonl", r"t\.jsonl:2: a row must be an object"),
        ("t.json", '[{"a": 1},\n {"a": ]', "{d}/t.json", r"t\.json:2: broken JSON"),
        ("t.json", '{"a":\n 1}', "{d}/t.json", "holds one dict"),
        ("t.json", '{"a": 1}\n{"a" 2}', "{d}/t.json", r"t\.json:2: not a JSON row"),
        ("t.csv", 'a,b\n1,"2\n', "{d}/t.csv", "broken csv"),
        ("t.parquet", "no parquet", "{d}/t.parquet", r"t\.parquet: not a parquet file"),
        ("t.jsonl", "{}", "{d}/t.jsonl@train", "is one file and has no splits"),
        ("train.jsonl", "{}", "{d}@test", "no file of split 'test'; splits found: train"),
        ("readme.md", "x", "{d}", "holds no data file"),
        ("train.jsonl", "{}", "csv@{d}", "holds no csv file"),
        ("train.jsonl", "{}", "json@{d}/nowhere", "no such folder"),
        ("train.jsonl", "{}", "{d}/sub/dir/x", "does not exist"),
    ],
)
def test_bad_sources_are_named(tmp_path, name, content, spec, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(spec.format(d=tmp_path)))


def test_files_that_are_not_utf8_are_named(tmp_path):
    for name in ("t.jsonl", "t.json", "t.csv"):
        (tmp_path / name).write_bytes(b"\xff\xfe[\x00")
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            list(read_rows(str(tmp_path / name)))


def test_folder_of_mixed_kinds_asks_which(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="several kinds"):
        read_rows(str(tmp_path))


def test_files_of_a_folder_that_no_split_is_named_in_are_named_once(tmp_path, caplog):
    for name in ("train-0.jsonl", "test-0.jsonl", "more.jsonl", "old.jsonl"):
        write(tmp_path / name)
    for _ in range(2):
        assert len(read_rows(str(tmp_path))) == 3
    assert caplog.messages == [f"{tmp_path}: 2 files that no split is named in are not read: more.jsonl, old.jsonl"]


def test_no_source_at_all_is_refused():
    with pytest.raises(DataError, match="no data source"):
        read_rows([])


def test_import_and_count_load_no_heavy_package(tmp_path):
    spec = [str(write(tmp_path / "a.jsonl")), str(write(tmp_path / "b.parquet"))]
    code = (
        "import sys, r1_data; light = set(sys.modules); n = r1_data.count_rows(sys.argv[1:]); assert n == 6, n; "
        "heavy = {'torch', 'datasets', 'transformers'} & set(sys.modules); assert not heavy, heavy; "
        "early = {'pyarrow', 'PIL', 'jinja2', 'numpy'} & light; assert not early, early"
    )
    done = subprocess.run([sys.executable, "-c", code, *spec], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_a_row_over_the_bound_in_bytes_is_overlong_by_name_and_the_others_are_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("r1_data.tables.table.MAX_ROW_BYTES", 10_000)
    monkeypatch.setattr("r1_data.tables.files.MAX_ROW_BYTES", 10_000)
    monkeypatch.setattr("r1_data.tables.files.BLOCK", 4_000)  # bytes that are unpacked at a time
    path = tmp_path / f"train.{suffix}"
    rows = [{"a": "1"}, {"a": "x" * 100_000}, {"a": "y" * 5_000}, {"a": "3"}]
    plain = write(path if suffix == "parquet" else tmp_path / "rows.jsonl", rows)
    if plain != path:
        with pyarrow.output_stream(str(path)) as stream:  # packed as the name says
            stream.write(plain.read_bytes())
    rows = read_rows(str(path))
    assert [rows[i][1]["a"][0] for i in (0, 2, 3)] == ["1", "y", "3"]
    with pytest.raises(Overlong, match=rf"train\.{suffix}:2: the row has more than 10,000 bytes"):
        rows[1]
    assert [row[1]["a"][0] for row in (rows[3], rows[2], rows[0])] == ["3", "y", "1"]
    if suffix not in ("jsonl", "parquet"):
        assert os.fstat(rows._tables[0][1]._text.open().fileno()).st_size < 30_000
