"""Rows with the columns of the hub data sets that recipes use."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]


def write_rows(folder: Path) -> None:
    """Write a file of each kind: problems of geometry and of counting, with pictures, and two kinds of text."""
    pictures = pq.read_table(ROOT / "examples/quickstart/val.parquet").slice(0, 16).to_pylist()
    pq.write_table(pa.Table.from_pylist(pictures), folder / "geometry.parquet")
    counting = [
        {
            "image": row["images"][0],
            "problem": row["problem"].removeprefix("<image>"),
            "solution": f"<answer> {row['answer']} </answer>",
        }
        for row in pictures
    ]
    pq.write_table(pa.Table.from_pylist(counting), folder / "counting.parquet")
    sums = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(256)]
    words = (ROOT / "examples/gsm8k/sample.jsonl").read_text("utf-8").splitlines()
    (folder / "mathematics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "words.jsonl").write_text("\n".join(words[:16]) + "\n")
