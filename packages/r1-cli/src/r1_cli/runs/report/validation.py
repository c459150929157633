"""Validation scores of a run with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from r1_cli.runs.reader import RunReader
from r1_cli.runs.statistics import SURE, wilson


@dataclass(frozen=True, slots=True)
class Measured:
    step: int
    rows: int
    value: float
    low: float
    high: float


def measure(run: RunReader, steps: Sequence[int] | None = None) -> list[Measured]:
    """Return the score of each recorded validation, or of those of `steps`; a row's score is its answers' mean."""
    found = []
    for step in run.recorded_steps("validation") if steps is None else steps:
        rows: dict[int, list[float]] = {}
        for one in run.readable_samples(step, "validation", ["group", "score", "parts"]):
            score = one["parts"].get("accuracy", one["score"])
            if math.isfinite(score):
                rows.setdefault(one["group"], []).append(score)
        if rows:
            found.append(interval(step, [fmean(scores) for scores in rows.values()]))
    return found


def interval(step: int, scores: Sequence[float]) -> Measured:
    """Return the mean of the rows' scores with its 95 % interval.

    For scores of 0 or 1 Wilson's interval, which also holds for few rows and near 0 and 1; else that of the normal
    distribution.
    """
    count, mean = len(scores), fmean(scores)
    if set(scores) <= {0.0, 1.0}:
        found = wilson(mean, count)
        return Measured(step, count, mean, found.low, found.high)
    half = SURE * stdev(scores) / math.sqrt(count) if count > 1 else math.inf
    return Measured(step, count, mean, mean - half, mean + half)
