"""What `examples/compare.py` measured of an algorithm: the curve and the table of its page."""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = str(ROOT / "examples")
sys.path.insert(0, EXAMPLES)

import compare  # noqa: E402

sys.path.remove(EXAMPLES)  # or its folder reasoning_gym would be taken for the package of this name

DEFAULTS = {"algorithm.adv_estimator": "grpo", "worker.actor.loss_type": "default"}
MEASURED = """\
The quickstart's task: 24 steps of 128 answers, four optimizer steps each, a model of a million weights, on two x86-64
cores. Dark: the mean of the runs; light: each run; dashed: GRPO. Differences below the spread are none
([all rows](../../benchmarks/results/compare.md))."""


@cache
def found() -> dict[str, list[dict[str, Any]]]:
    return compare.read_found()


def rows(key: str, names: Sequence[str]) -> list[str]:
    """The measured rows of an algorithm, the one that it is the subject of first."""
    chosen = {f"{key}={name}" for name in names}
    return [row for row in found() if chosen & {*compare.ROWS[row].words} or (row == "grpo" and DEFAULTS[key] in names)]


def picture(row: str) -> str:
    return str(compare.curves(found(), row))


def section(key: str, names: Sequence[str], page: str) -> Iterator[str]:
    """The lines of the section, with GRPO's row to compare with."""
    mine = rows(key, names)
    if not mine:
        yield "Not measured: no run of [`examples/compare.py`](../../examples/compare.py) has it."
        return
    yield MEASURED
    yield from ("", f"![Accuracy of {names[0]} by answers sampled]({page}.svg)", "")
    yield compare.table({row: found()[row] for row in dict.fromkeys([*mine, "grpo"])})
    for row in mine:
        if more := [f"`{word}`" for word in compare.ROWS[row].words if word not in {f"{key}={name}" for name in names}]:
            yield from ("", f"{compare.ROWS[row].title} was run with {', '.join(more)}.")
