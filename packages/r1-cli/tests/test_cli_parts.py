"""The files of `r1 sample`: blocks and shards, keys of rows, and what stands in a folder."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from r1_cli.config import ConfigError
from r1_cli.runs.rows.parts import OF_A_SOURCE, PART, Block, RowShard, SampleFolder, key_of, split_blocks
from r1_data.types import Example, Video

KEPT = st.lists(st.sets(st.integers(0, 60)).map(sorted), max_size=3)
EXAMPLE = Example("a.parquet:3", [{"role": "user", "content": "1 + 1?"}], (), "2", {"level": 3}, "sums")


@given(KEPT, st.integers(1, 20), st.integers(1, 9), st.none() | st.integers(0, 80))
def test_shards_have_every_row_once_in_the_blocks_of_a_single_process(
    kept: list[list[int]], size: int, count: int, limit: int | None
) -> None:
    whole = list(split_blocks(kept, size, limit))
    shards = [RowShard(number, count) for number in range(1, count + 1)]
    assert all(sum(shard.has(block.number) for shard in shards) == 1 for block in whole)
    rows = [(block.source, index) for block in whole for index in block.rows.values()]
    assert rows == [(source, index) for source, numbers in enumerate(kept) for index in range(len(numbers))][:limit]
    assert len({block.number for block in whole}) == len(whole)
    assert all(0 <= place < size for block in whole for place in block.rows)


def test_blocks_depend_on_the_numbers_of_rows_alone() -> None:
    """Rows that a filter leaves out move no other row to another block."""
    assert list(split_blocks([[0, 2, 3, 9], [1]], 3)) == [
        Block(0, 0, {0: 0, 2: 1}),
        Block(1, 0, {0: 2}),
        Block(3, 0, {0: 3}),
        Block(OF_A_SOURCE, 1, {1: 0}),
    ]


def test_a_shard_is_written_as_number_and_count() -> None:
    assert [RowShard.parse(text) for text in ("1/1", "3/8")] == [RowShard(), RowShard(3, 8)]
    for text in ("3", "0/8", "9/8", "3/", "a/8", "-1/8"):
        with pytest.raises(ValueError, match="3/8"):
            RowShard.parse(text)
    assert [block for block in range(20) if RowShard.parse("3/8").has(block)] == [2, 10, 18]


def test_a_key_is_of_what_the_model_and_the_reward_see(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"12345")
    other = tmp_path / "other" / "a.png"
    other.parent.mkdir()
    other.write_bytes(b"54321")
    examples = [
        EXAMPLE,
        replace(EXAMPLE, id="a.parquet:4"),
        replace(EXAMPLE, messages=[{"role": "user", "content": "1 + 2?"}]),
        replace(EXAMPLE, ground_truth="3"),
        replace(EXAMPLE, tools=({"type": "function"},)),
        replace(EXAMPLE, source="others"),
        replace(EXAMPLE, media=(b"1",)),
        replace(EXAMPLE, media=(b"2",)),
        replace(EXAMPLE, media=(picture,)),
        replace(EXAMPLE, media=(Image.new("RGB", (2, 2)),)),
        replace(EXAMPLE, media=(Image.new("RGB", (2, 2), "red"),)),
        replace(EXAMPLE, media=(Video((b"1",), fps=1.0),)),
        replace(EXAMPLE, media=(Video((b"1",), fps=2.0),)),
    ]
    keys = [key_of(example, "one") for example in examples] + [key_of(EXAMPLE, "two")]
    assert len(set(keys)) == len(keys)
    assert key_of(replace(EXAMPLE, metadata={"level": 4}), "one") == keys[0]
    moved = replace(EXAMPLE, media=(other,))  # as large, so taken for the same
    assert key_of(moved, "one") == key_of(replace(EXAMPLE, media=(picture,)), "one")


def part(groups: dict[int, str], answer: str = "") -> pa.Table:
    rows = [
        {"group": group, "sample": sample, "key": key, "answer": f"{answer}{sample}"}
        for group, key in groups.items()
        for sample in range(2)
    ]
    return pa.Table.from_pylist(rows, schema=PART)


def test_groups_are_added_in_the_order_of_the_rows_and_replaced_ones_put_aside(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    assert folder.keys(3) == {}
    assert folder.read(3) is None
    folder.add(3, part({1: "b", 5: "f"}))
    folder.add(3, part({0: "a", 5: "g"}, "new "))
    assert folder.keys(3) == {0: "a", 1: "b", 5: "g"}
    table = folder.read(3)
    assert table is not None
    assert table["answer"].to_pylist() == ["new 0", "new 1", "0", "1", "new 0", "new 1"]
    folder.add(3, part({5: "h"}))
    aside = sorted((tmp_path / "aside").iterdir())
    assert [path.name for path in aside] == ["000000003-sample.2.parquet", "000000003-sample.parquet"]


def test_a_damaged_part_is_put_aside_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = SampleFolder(tmp_path)
    folder.add(0, part({0: "a"}))
    os.truncate(folder.file(0), 400)
    assert folder.keys(0) == {}
    assert f"{folder.file(0)} is damaged" in caplog.text
    assert not folder.file(0).exists()
    assert len(list((tmp_path / "aside").iterdir())) == 1


def test_a_folder_has_answers_of_one_model_and_sampling(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    folder.require_same({"model": "a", "sampling": {"n": 4, "stop": ()}})
    folder.require_same({"model": "a", "sampling": {"n": 4, "stop": ()}})
    with pytest.raises(ConfigError, match=r"sampled otherwise \(model was 'a', is 'b'; sampling.n was 4, is 8\)"):
        folder.require_same({"model": "b", "sampling": {"n": 8, "stop": ()}})


def test_a_shard_is_sampled_by_one_process_and_shards_are_of_one_count(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path / "samples")
    with folder.locked(RowShard(1, 3)), folder.locked(RowShard(2, 3)):
        with pytest.raises(ConfigError, match=rf"in use by another run: process {os.getpid()} on .*--shard"):
            folder.locked(RowShard(1, 3)).__enter__()
        with pytest.raises(ConfigError, match="splits the rows otherwise"):
            folder.locked(RowShard(1, 4)).__enter__()
    with folder.locked(RowShard(1, 4)):
        pass
