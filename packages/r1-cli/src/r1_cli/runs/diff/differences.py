"""What differs between two runs: settings, rows, code, packages, machine, and where their curves part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r1_cli.runs.diff.run import Run

# What a run is judged by; of others, too, the first step that is not identical is told.
CURVES = (
    "reward/overall", "reward/accuracy", "reward/format", "val/reward_score", "response_length/mean",
    "actor/entropy_loss", "actor/kl_loss", "actor/grad_norm", "rollout/logprob_gap_mean",
)  # fmt: skip
CLOCKED = ("timing_s/", "timing_per_token_ms/", "perf/")  # never the same twice
WINDOW = 5  # values in a mean, at least; else a twentieth of the run
ERRORS = 4.0  # standard errors that two means lie apart by where curves have parted
SECTIONS = {"rows": "rows", "git": "code", "packages": "packages", "python": "packages", "host": "machine"}


@dataclass(frozen=True, slots=True)
class Change:
    """A thing that is not the same in both runs; None where a run has none of it."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Curve:
    """A number in both runs: means over the window in which they part first, or over the last one."""

    name: str
    parts: bool
    begin: int  # step that the window begins with
    end: int
    first: float
    second: float
    error: float  # standard error of the difference of the means


@dataclass(frozen=True, slots=True)
class Differences:
    """What `compare` found. `changes` by section, in the order in which they are shown."""

    changes: dict[str, list[Change]]
    unknown: list[str]  # what cannot be compared, and why
    same_seeds: bool | None  # None: not known
    steps: int  # that both have
    unequal: tuple[int, list[str]] | None  # the first step of both with other numbers, and which
    curves: list[Curve]


def compare(one: Run, other: Run) -> Differences:
    """Compare two runs; what a run has no record of is named in `unknown`."""
    changes = {"settings": changed(one.settings(), other.settings())}
    for name, section in SECTIONS.items():
        first, second = one.known(name), other.known(name)
        changes.setdefault(section, []).extend(changed(first, second) if first and second else ())
    sides = (("the first", one), ("the second", other))
    unknown = [f"{which} run has no manifest: rows, code, packages, machine" for which, run in sides if not run.starts]
    unknown += [f"{which} run has no settings" for which, run in sides if not run.settings()]
    if unknown and not (one.settings() and other.settings()):
        changes["settings"] = []
    if any(run.known("git").get("changed") for _, run in sides):
        unknown.append("files that were not committed: the manifest says that there were some, not what was in them")
    seeds = _seeds(one), _seeds(other)
    common = sorted(_by_step(one).keys() & _by_step(other).keys())
    curves = [found for name in CURVES if (found := part(name, one, other))]
    same = seeds[0] == seeds[1] if all(seeds) else None
    return Differences(changes, unknown, same, len(common), find_unequal(one, other), curves)


def changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Change]:
    """Return the keys whose values are not the same, by name."""
    names = sorted(first.keys() | second.keys())
    return [Change(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def find_unequal(one: Run, other: Run) -> tuple[int, list[str]] | None:
    """Return the first step of both whose numbers are not identical, and which they are; times and rates aside."""
    first, second = _by_step(one), _by_step(other)
    for step in sorted(first.keys() & second.keys()):
        names = sorted(first[step].keys() | second[step].keys())
        unequal = [
            name
            for name in names
            if not name.startswith(CLOCKED) and not _identical(first[step].get(name), second[step].get(name))
        ]
        if unequal:
            return step, unequal
    return None


def part(name: str, one: Run, other: Run) -> Curve | None:
    """Return where a number's curves part: the first window whose means differ by more than `ERRORS` standard errors.

    The noise of a value is taken from how it differs from the one before, so that a rise is no noise. None below two
    windows that both runs have, and where values are too large to square.
    """
    first, second = dict(one.history.series(name)), dict(other.history.series(name))
    steps = sorted(first.keys() & second.keys())
    size = max(WINDOW, len(steps) // 20)
    if len(steps) < 2 * size:
        return None
    values = [np.array([float(series[step]) for step in steps]) for series in (first, second)]
    with np.errstate(over="ignore", invalid="ignore"):
        means = [_means(one, size) for one in values]
        error = float(np.sqrt((_variance(values[0]) + _variance(values[1])) / size))
        apart = np.flatnonzero(np.abs(means[0] - means[1]) > ERRORS * error)
    if not (math.isfinite(error) and all(np.isfinite(one).all() for one in means)):
        return None
    place = int(apart[0]) if len(apart) else len(means[0]) - 1
    at = (steps[place], steps[place + size - 1], float(means[0][place]), float(means[1][place]))
    return Curve(name, bool(len(apart)), *at, error)


def _means(values: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.float64]:
    """Return the mean of each `size` neighbours, [N - size + 1]; exactly a value that does not change."""
    return np.lib.stride_tricks.sliding_window_view(values, size).mean(axis=-1)


def _variance(values: npt.NDArray[np.float64]) -> np.float64:
    return np.float64(np.mean(np.square(np.diff(values))) / 2)


def _seeds(run: Run) -> dict[str, Any]:
    settings = run.known("config") | run.settings()
    return {name: settings[name] for name in ("data.seed", "worker.rollout.seed") if name in settings}


def _by_step(run: Run) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in run.history.steps}


def _identical(first: float | None, second: float | None) -> bool:
    both_odd = first is not None and second is not None and first != first and second != second
    return first == second or both_odd
