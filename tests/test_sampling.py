"""`r1 sample`: answers once, whatever was killed, torn, sharded or changed meanwhile."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT

MODEL = "examples/quickstart/model"
ROWS = 24
FEW = [
    "data.filter_overlong_prompts_workers=1", f"data.train_files=examples/quickstart/train.parquet[:{ROWS}]",
    "--n", "2", "--block", "8",
]  # fmt: skip
WORDS = ["sample", MODEL, QUICKSTART, *FEW]


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


def starts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["starts"]
    return found


@pytest.fixture(scope="module")
def whole(r1: R1, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "samples"
    r1(*WORDS, "--output", folder)
    return folder


def test_answers_are_recorded_as_those_of_a_run(whole: Path, r1: R1) -> None:
    table = pa.concat_tables([pq.read_table(path) for path in sorted((whole / "samples").iterdir())])
    assert set(table["phase"].to_pylist()) == {"sample"}
    assert table["prompt_id"].to_pylist() == [f"train.parquet:{row}" for row in range(1, ROWS + 1) for _ in range(2)]
    assert table["sample"].to_pylist() == [0, 1] * ROWS
    assert len(set(table["key"].to_pylist())) == ROWS
    assert {len(name) for name in table["media"].to_pylist()} == {1}
    assert starts(whole)[0]["counts"]["groups"] == ROWS
    assert starts(whole)[0]["end"] == "complete"
    assert "Answers of step 2" in Path(r1("report", whole).output.split(" (")[0]).read_text()


def test_shards_write_the_files_of_a_single_process(whole: Path, r1: R1, tmp_path: Path) -> None:
    for number in (3, 1, 2):
        r1(*WORDS, "--output", tmp_path, "--shard", f"{number}/3")
    assert parts(tmp_path) == parts(whole)
    assert [one["counts"]["groups"] for one in starts(tmp_path)] == [8, 8, 8]


def test_a_torn_and_a_missing_part_are_sampled_again_and_nothing_else(whole: Path, r1: R1, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "samples")
    first, second, _ = sorted((folder / "samples").iterdir())
    first.unlink()
    os.truncate(second, 1000)
    r1(*WORDS, "--output", folder)
    assert parts(folder) == parts(whole)
    assert starts(folder)[-1]["counts"]["there"] == ROWS // 3
    ended = r1(*WORDS, "--output", folder, "worker.rollout.temperature=0.5", ok=False)
    assert "sampling.temperature was 1.0, is 0.5" in ended.stderr


def test_rows_that_have_changed_are_named_sampled_again_and_put_aside(whole: Path, r1: R1, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "samples")
    rows = pq.read_table(ROOT / "examples/quickstart/train.parquet").slice(0, ROWS)
    answers = rows["answer"].to_pylist()
    before, answers[5] = answers[5], "9"
    column = rows.schema.get_field_index("answer")
    rows = rows.set_column(column, rows.schema.field(column), pa.array(answers, rows.schema.field(column).type))
    file = tmp_path / "train.parquet"
    pq.write_table(rows, file)
    words = [word.replace("examples/quickstart/train.parquet", str(file)) for word in WORDS]
    ended = r1(*words, "--output", folder)
    assert "1 rows have changed since they were sampled, and are sampled again: train.parquet:6" in ended.output
    (old,) = (folder / "aside").iterdir()
    assert pq.read_table(old)["ground_truth"].to_pylist() == [before] * 2
    now, then = (pq.read_table(f / "samples/000000000-sample.parquet").to_pylist() for f in (folder, whole))
    assert [a["prompt_id"] for a, b in zip(now, then, strict=True) if a != b] == ["train.parquet:6"] * 2
    assert now[10]["ground_truth"] == "9"
