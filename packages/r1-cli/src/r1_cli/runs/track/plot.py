"""Curves made of characters: a few lines of blocks that a terminal shows at a glance."""

import math
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"  # of a line, from nothing to all of it


def plot(points: Sequence[tuple[float, float]], width: int, height: int, first: float, last: float) -> list[str]:
    """Return `height` lines of `width` characters, from above, in which the mean of the points of a column stands.

    A column without any, between two that have some, has that of the one before. The lowest value is the lowest block
    and the highest fills all lines; values that are all alike lie half-way up.

    Args:
        points: (place, value); those whose value is not finite are left out.
        first, last: the places at the left and the right edge.
    """
    columns = _held(spread(points, width, first, last))
    known = [value for value in columns if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    levels = [None if value is None else _level(value, low, high, height) for value in columns]
    return ["".join(_block(level, line) for level in levels) for line in reversed(range(height))]


def spread(points: Sequence[tuple[float, float]], width: int, first: float, last: float) -> list[float | None]:
    """Return the mean of the finite values of each column; None where there are none."""
    sums, counts = [0.0] * width, [0] * width
    for place, value in points:
        if math.isfinite(value) and first <= place <= last:
            column = min(int((place - first) / max(last - first, 1e-9) * width), width - 1)
            sums[column] += value
            counts[column] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _held(columns: list[float | None]) -> list[float | None]:
    """Let each value stand until the next."""
    known = [place for place, value in enumerate(columns) if value is not None]
    held = list(columns)
    for place in range(known[0] + 1, known[-1]) if known else ():
        held[place] = held[place - 1] if held[place] is None else held[place]
    return held


def _level(value: float, low: float, high: float, height: int) -> int:
    """How many eighths of a line stand for a value, 1 at least."""
    most = 8 * height
    return most // 2 if high <= low else max(1, round((value - low) / (high - low) * most))


def _block(level: int | None, line: int) -> str:
    return BLOCKS[min(max((level or 0) - 8 * line, 0), 8)]
