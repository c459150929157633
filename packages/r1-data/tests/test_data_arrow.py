"""Tests of Arrow rows: folders that `datasets` saved, and reader of rows read one after the other."""

import json
import pickle

import datasets
import pytest

from r1_data.sources import count_rows, read_rows
from r1_data.tables.table import BatchedReader
from r1_data.types import DataError

ROWS = [{"problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(700)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set of one split, one of two splits, and one whose rows were chosen among others before it was saved."""
    folder = tmp_path_factory.mktemp("saved")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(folder / "one", num_shards=3)
    datasets.DatasetDict({"train": one, "validation": one.select([5])}).save_to_disk(folder / "two")
    one.select(range(0, 700, 70)).save_to_disk(folder / "chosen")
    return folder


def test_a_saved_data_set_is_read_with_its_rows_in_order(saved):
    rows = read_rows(str(saved / "one"))
    assert [row for _, row in rows] == ROWS
    assert (rows[0][0], rows[699][0], count_rows(str(saved / "one"))) == ("one:1", "one:700", 700)
    assert [row for _, row in read_rows(str(saved / "chosen"))] == ROWS[::70]
    assert [row_id for row_id, _ in read_rows(f"{saved}/one@train[:2]")] == ["one:1", "one:2"]


def test_splits_of_a_saved_data_set_are_read_by_name(saved):
    assert len(read_rows(f"{saved}/two")) == len(read_rows(f"{saved}/two@train")) == 700
    (row_id, row), *others = read_rows(f"{saved}/two@val")
    assert (row_id, row, others) == ("two/validation:1", ROWS[5], [])
    with pytest.raises(DataError, match="no split 'test' was saved; splits found: train, validation"):
        read_rows(f"{saved}/two@test")
    with pytest.raises(DataError, match="no split 'test' was saved; splits found: none"):
        read_rows(f"{saved}/one@test")


def test_pictures_of_a_saved_data_set_stay_encoded(tmp_path, picture):
    features = datasets.Features({"images": datasets.Sequence(datasets.Image())})
    datasets.Dataset.from_dict({"images": [[picture(9, 7)]]}, features=features).save_to_disk(tmp_path / "set")
    assert read_rows(str(tmp_path / "set"))[0][1]["images"][0]["bytes"] == picture(9, 7)


def test_a_saved_data_set_goes_to_another_process_by_its_path(saved):
    rows = read_rows(str(saved / "one"))
    sent = pickle.dumps(rows)
    assert len(sent) < 10_000
    assert pickle.loads(sent)[699] == rows[699]


@pytest.mark.parametrize("broken", ["state.json", "dataset_dict.json", "data-00000-of-00001.arrow"])
def test_a_saved_data_set_that_is_broken_is_named(tmp_path, broken):
    folder = tmp_path / "set"
    if broken == "dataset_dict.json":
        folder.mkdir()
        (folder / broken).write_text(json.dumps(["train"]))
    else:
        datasets.Dataset.from_list(ROWS[:3]).save_to_disk(folder)
        (folder / broken).write_bytes((folder / broken).read_bytes()[:40])
    with pytest.raises(DataError, match=r"set.*cannot be read"):
        read_rows(str(folder))[2]


def test_rows_read_one_after_the_other_are_fetched_in_runs_and_others_alone():
    asked = []

    def fetch(start, most):
        asked.append((start, most))
        return range(start, start + min(most, 10))

    reader = BatchedReader(fetch)
    assert [reader[index] for index in (7, 3, 3, *range(4, 20))] == [7, 3, 3, *range(4, 20)]
    assert [(start, most > 1) for start, most in asked] == [(7, False), (3, False), (4, True), (14, True)]
