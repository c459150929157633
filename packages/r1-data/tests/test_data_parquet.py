"""Tests of parquet files: any size, any order, one row group at a time, and a broken group costs its own rows."""

import pickle
import random
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from r1_data.sources import read_rows
from r1_data.types import DataError

MEGABYTE = 2**20
PICTURES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("images", pa.list_(PICTURES))])

PLAIN = {"use_dictionary": False, "write_statistics": False}


def write(path, groups, rows=1, size=10, compression="zstd"):
    """Row groups of `rows` rows, each with a picture of `size` equal bytes, as EasyR1's data sets nest them."""
    with pq.ParquetWriter(path, SCHEMA, compression=compression, **PLAIN) as writer:
        for group in range(groups):
            numbers = range(group * rows, (group + 1) * rows)
            images = [[{"bytes": bytes([n % 256]) * size, "path": None}] for n in numbers]
            columns = [[f"<image>{n}" for n in numbers], [str(n) for n in numbers], images]
            writer.write_table(pa.table(columns, schema=SCHEMA))


@pytest.mark.slow
def test_nested_pictures_of_over_two_gigabytes_are_read_without_being_held(tmp_path):
    table = pa.table([["<image>?"], ["1"], [[{"bytes": bytes(128 * MEGABYTE), "path": None}]]], schema=SCHEMA)
    with pq.ParquetWriter(tmp_path / "train.parquet", SCHEMA, compression="lz4", **PLAIN) as writer:
        for _ in range(17):
            writer.write_table(table)
    del table
    rows = read_rows(str(tmp_path / "train.parquet"))
    assert len(rows) == 17
    before = pa.total_allocated_bytes()
    for index in (16, 0):
        row_id, row = rows[index]
        assert (row_id, len(row["images"][0]["bytes"])) == (f"train.parquet:{index + 1}", 128 * MEGABYTE)
        del row
    assert pa.total_allocated_bytes() - before < 300 * MEGABYTE


@pytest.mark.parametrize("size", [10, 40_000])  # held in memory, and mapped
def test_rows_in_any_order_are_those_of_the_file(tmp_path, size):
    write(tmp_path / "train.parquet", groups=5, rows=400, size=size)
    rows = read_rows(str(tmp_path / "train.parquet"))
    order = random.Random(0).sample(range(2000), 200)
    assert [rows[i][1]["answer"] for i in order] == [str(i) for i in order]
    again = pickle.loads(pickle.dumps(rows))
    assert again[order[0]] == rows[order[0]]


def test_a_full_folder_for_temporary_files_costs_memory_and_no_row(tmp_path, caplog):
    write(tmp_path / "train.parquet", groups=1, rows=800, size=100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEGABYTE, before[1]))
    try:
        rows = read_rows(str(tmp_path / "train.parquet"))
        assert rows[500][1]["answer"] == "500"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "set TMPDIR" in caplog.text


def test_rows_of_a_broken_row_group_are_named_and_the_others_read(tmp_path):
    path = tmp_path / "train.parquet"
    write(path, groups=3, rows=2, size=20_000, compression="none")
    meta = pq.read_metadata(path).row_group(1).column(2)
    data = bytearray(path.read_bytes())
    start = meta.dictionary_page_offset or meta.data_page_offset
    data[start : start + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))
    rows = read_rows(str(path))
    assert [rows[i][1]["answer"] for i in (0, 1, 4, 5)] == ["0", "1", "4", "5"]
    for index in (2, 3):
        with pytest.raises(DataError, match=rf"train.parquet:{index + 1}: its row group 2 of 3 cannot be read"):
            rows[index]
