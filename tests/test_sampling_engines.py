"""`r1 sample` gives the same greedy answers by every engine."""

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")]
WORDS = [
    "sample", "examples/quickstart/model", QUICKSTART, "data.train_files=examples/quickstart/train.parquet[:12]",
    "data.filter_overlong_prompts_workers=1", "worker.rollout.temperature=0", "--n", "1",
]  # fmt: skip
ENGINES = {
    "embedded": [],
    "vllm": ["worker.rollout.name=vllm"],
    "servers": [
        "worker.rollout.name=vllm", "worker.rollout.servers.count=1", "worker.rollout.servers.start_timeout=900",
    ],
}  # fmt: skip


def test_greedy_answers_are_the_same_by_every_engine(r1: R1, tmp_path: Path) -> None:
    found = {}
    for name, words in ENGINES.items():
        r1(*WORDS, *words, "--output", tmp_path / name)
        table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / name / "samples").iterdir())])
        found[name] = table.select(["prompt_id", "tokens"]).to_pylist()
    assert len(found["embedded"]) == 12
    assert found["vllm"] == found["embedded"]
    assert found["servers"] == found["embedded"]
