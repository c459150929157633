"""Validation scores of a run with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from r1_cli.runs.reader import RunReader

SURE = 1.959963985  # standard deviations of a normal distribution that hold 95 % of it


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

    For scores of 0 or 1 Wilson's interval (J. Am. Stat. Assoc. 22, 209, 1927), which also holds for few rows and near 0
    and 1; else that of the normal distribution.
    """
    count, mean = len(scores), fmean(scores)
    if set(scores) <= {0.0, 1.0}:
        below = 1 + SURE**2 / count
        middle = (mean + SURE**2 / (2 * count)) / below
        half = SURE * math.sqrt(mean * (1 - mean) / count + SURE**2 / (4 * count**2)) / below
        return Measured(step, count, mean, max(middle - half, 0.0), min(middle + half, 1.0))
    half = SURE * stdev(scores) / math.sqrt(count) if count > 1 else math.inf
    return Measured(step, count, mean, mean - half, mean + half)
