"""Compare a repeated step with the recorded one: responses, per-token values, metrics."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from r1_cli.runs.reader import RunReader

# In the order in which a step makes them: the first that differs is where to look.
IN_ORDER = (
    "prompt_id", "prompt_tokens", "media", "tokens", "rollout_logprobs", "finish_reason", "score", "parts", "failure",
    "reward", "old_logprobs", "entropies", "ref_logprobs", "advantages",
)  # fmt: skip
OF_THE_CLOCK = ("timing_", "perf/")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a step and its repetition have in common."""

    answers: int | None  # that were compared; None: the run has no record of the step
    metrics: int | None  # that were compared; None: the run has no log of the step
    differences: list[str]  # in the order in which a step makes what differs
    changes: list[str]  # of what the run stood on: packages, code, rows

    @property
    def same(self) -> bool:
        """Whether everything that could be compared is equal to the bit, and something could."""
        return not self.differences and (self.answers or self.metrics) is not None


def compare_step(run: Path, again: Path, step: int) -> Comparison:
    """Compare a step of the folder `run` with its repetition in the folder `again`."""
    differences: list[str] = []
    answers = None
    if step in RunReader(run).recorded_steps():
        then, now = (RunReader(folder).sample_table(step) for folder in (run, again))
        answers = len(then)
        differences += compare_tables(then, now)
    metrics = None
    logged, repeated = (read_metrics(folder, step) for folder in (run, again))
    if logged:
        metrics = len(logged)
        differences += [
            f"{name} is {repeated.get(name)!r}, was {value!r}"
            for name, value in logged.items()
            if not _equal(value, repeated.get(name))
        ]
    return Comparison(answers, metrics, differences, list_changes(run, again))


def compare_tables(then: pa.Table, now: pa.Table) -> list[str]:
    """Return the columns that differ, each with its first row that does."""
    if len(then) != len(now):
        return [f"{len(now)} answers, there were {len(then)}"]
    return [
        f"{name} of group {then['group'][row].as_py()}, answer {then['sample'][row].as_py()}"
        for name in IN_ORDER
        if name in then.column_names  # which a record of an older version may lack
        if (row := _first_unequal(then[name].to_pylist(), now[name].to_pylist())) is not None
    ]


def read_metrics(run: Path, step: int) -> dict[str, Any]:
    """Return a step's metrics but times and validation; {} if it was not logged."""
    found: dict[str, Any] = {}
    for row in RunReader(run).records():
        if row.get("step") == step:
            found |= row
    return {name: value for name, value in found.items() if not name.startswith((*OF_THE_CLOCK, "val/", "val-"))}


def list_changes(run: Path, again: Path) -> list[str]:
    """Return changes of packages, commit and rows since the run's last start."""
    starts = RunReader(run).starts()[-1:], RunReader(again).starts()[-1:]
    if not all(starts):
        return []
    then, now = starts[0][0], starts[1][0]
    changes = [
        f"{name} {now['packages'].get(name)}, was {known}"
        for name, known in then["packages"].items()
        if now["packages"].get(name) != known
    ]
    commits = [(one.get("git") or {}).get("commit") for one in (then, now)]
    if commits[0] != commits[1]:
        changes.append(f"commit {commits[1]}, was {commits[0]}")
    changes += [
        f"other rows in {name}"
        for name, digest in now["rows"].items()
        if name in then["rows"] and then["rows"][name] != digest
    ]
    return changes


def _first_unequal(then: list[Any], now: list[Any]) -> int | None:
    return next((row for row, (a, b) in enumerate(zip(then, now, strict=True)) if not _equal(a, b)), None)


def _equal(a: object, b: object) -> bool:
    """Return whether values are equal to the bit; NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
