"""Rows with the columns of the hub data sets that recipes use."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]


def write_rows(folder: Path) -> None:
    """Write a file of each kind: problems with pictures, and of text."""
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
    zooming = [
        {
            "data_source": "vstar",
            "prompt": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": row["problem"]},
            ],
            "images": row["images"],
            "reward_model": {"style": "model", "ground_truth": row["answer"]},
            "extra_info": {"question": row["problem"]},
        }
        for row in pictures
    ]
    (folder / "data/deepeyes").mkdir(parents=True)
    for name, rows in (("0.1.2", zooming * 8), ("v0.8", zooming * 8)):  # as many as a batch has
        path = folder / f"data/deepeyes/data_{name}_visual_toolbox_v2.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    questions = [{"question": f"What is {i} + 1?", "golden_answers": [str(i + 1), f"it is {i + 1}"]} for i in range(16)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    sums = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(256)]
    words = (ROOT / "examples/gsm8k/sample.jsonl").read_text("utf-8").splitlines()
    (folder / "mathematics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "words.jsonl").write_text("\n".join(words[:16]) + "\n")
