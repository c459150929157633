"""Reads a record: which steps there are, and the answers of some, a few columns at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from r1_cli.runs.record import SAMPLES
from r1_cli.runs.record.schema import SCHEMA, Phase, file_name


def read_steps(run: Path, phase: Phase = "train") -> list[int]:
    """Return the steps whose answers are recorded, in order; none for a run without a record."""
    return sorted(int(path.name.split("-")[0]) for path in (run / SAMPLES).glob(f"*-{phase}.parquet"))


def read_samples(
    run: Path, step: int, phase: Phase = "train", columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return the answers of a step as rows, group after group; the parts of a score as a dict.

    Args:
        columns: of `schema.COLUMNS`; None: all.

    Raises:
        FileNotFoundError: the step is not recorded; names those that are.
        KeyError: there is no such column.
    """
    rows = read_table(run, step, phase, columns).to_pylist()
    for row in rows:
        if "parts" in row:
            row["parts"] = dict(row["parts"] or ())
    return rows


def read_whole(run: Path, step: int, phase: Phase, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the answers of a step; none where its file is damaged, or has left the record meanwhile."""
    try:
        return read_samples(run, step, phase, columns)
    except (OSError, pa.ArrowException):
        return []


def read_table(run: Path, step: int, phase: Phase = "train", columns: Sequence[str] | None = None) -> pa.Table:
    """Return the answers of a step as a table. Raises as `read_samples` does."""
    path = run / SAMPLES / file_name(step, phase)
    if unknown := sorted({*(columns or ())} - {*SCHEMA.names}):
        raise KeyError(f"the record has no column {unknown[0]!r}; it has {', '.join(SCHEMA.names)}")
    if not path.is_file():
        steps = read_steps(run, phase)
        there = f"steps {steps[0]} to {steps[-1]} are" if steps else "none is"
        raise FileNotFoundError(f"{run}: step {step} is not in the record ({phase}); {there}")
    return pq.read_table(path, columns=None if columns is None else list(columns), partitioning=None)
