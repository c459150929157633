"""Stored evaluations with given marks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from r1_cli.runs.rows.parts import OF_A_SOURCE, PART, SETS, SampleFolder

Marks = Sequence[Sequence[float | None]]  # of each row's answers; None: it could not be scored


def write(path: Path, marks: Marks, **about: Any) -> Path:
    """Write an evaluation of one set."""
    return write_sets(path, {"math500/chat": marks}, **about)


def write_sets(path: Path, sets: Mapping[str, Marks], model: str = "0" * 32, **about: Any) -> Path:
    """Write an evaluation of several sets; `about` are entries of what is known of each."""
    path.mkdir(parents=True)
    known = {
        name: {"rows": len(marks), "digest": "blake2b:1", "prompt": "chat 1", "grader": "math 1",
               "n": max(map(len, marks)), **about}
        for name, marks in sets.items()
    }  # fmt: skip
    (path / "sampling.json").write_text(json.dumps({"model": model, "rows of a block": 2, SETS: known}))
    settings = {"worker": {"actor": {"model": {"model_path": path.name}}}}
    (path / "experiment_config.json").write_text(json.dumps(settings))
    rows: dict[int, list[dict[str, Any]]] = {}
    for source, marks in enumerate(sets.values()):
        for row, of_row in enumerate(marks):
            block = source * OF_A_SOURCE + row // 2
            for sample, mark in enumerate(of_row):
                rows.setdefault(block, []).append({
                    "step": block, "phase": "sample", "group": row % 2, "sample": sample, "prompt_id": f"a:{row}",
                    "source": "s", "prompt": "p", "answer": "x", "prompt_tokens": [1], "tokens": [1, 2],
                    "score": mark or 0.0, "parts": [], "finish_reason": "stop", "key": f"{source}/{row}",
                    "failure": None if mark is not None else "timeout: 30 s",
                })  # fmt: skip
    for block, of_block in rows.items():
        SampleFolder(path).add(block, pa.Table.from_pylist(of_block, schema=PART))
    return path
