"""Differences between two runs: settings, rows, code, packages, machine, and curves."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size

from r1_cli.runs.evaluation.logged import figure_names
from r1_cli.runs.history import EVALUATED, History
from r1_cli.runs.reader import RunReader
from r1_cli.runs.track.view import visible

# The metrics that judge a run. The first step that differs is searched for in all metrics, not only in these.
CURVES = (
    "reward/overall", "reward/accuracy", "reward/format", "val/reward_score", "sft/nll", "val/nll", "rewards/margins",
    "reward_loss", "margin", "val/rewards/accuracies", "val/accuracy", "response_length/mean",
    "actor/entropy_loss", "actor/kl_loss", "actor/grad_norm", "rollout/logprob_gap_mean",
)  # fmt: skip
CLOCKED = ("timing_s/", "timing_per_token_ms/", "perf/", "gen/busy")  # never the same twice
WINDOW = 5  # values in a mean, at least; else a twentieth of the run
ERRORS = 4.0  # standard errors that two means lie apart by where curves have parted
SECTIONS = {"rows": "rows", "git": "code", "packages": "packages", "python": "packages", "host": "machine"}
WIDTH = 100  # columns
NAME = 40
MOST = 40  # changes of a section that are shown


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Curve:
    """A number's means in both runs, over the first window in which they differ, or the last."""

    name: str
    parts: bool
    begin: int  # step that the window begins with
    end: int
    first: float
    second: float
    error: float  # standard error of the difference of the means


@dataclass(frozen=True, slots=True)
class Differences:
    changes: dict[str, list[Change]]
    unknown: list[str]  # what cannot be compared, and why
    same_seeds: bool | None  # None: not known
    steps: int  # that both have
    unequal: tuple[int, list[str]] | None  # the first step of both with other numbers, and which
    curves: list[Curve]


def compare(one: RunReader, other: RunReader) -> Differences:
    changes = {"settings": changed(one.flat_settings(), other.flat_settings())}
    for name, section in SECTIONS.items():
        first, second = one.flat_start(name), other.flat_start(name)
        changes.setdefault(section, []).extend(changed(first, second) if first and second else ())
    sides = (("the first", one), ("the second", other))
    unknown = [
        f"{which} run has no manifest: rows, code, packages, machine" for which, run in sides if not run.starts()
    ]
    unknown += [f"{which} run has no settings" for which, run in sides if not run.flat_settings()]
    if unknown and not (one.flat_settings() and other.flat_settings()):
        changes["settings"] = []
    if any(run.flat_start("git").get("changed") for _, run in sides):
        unknown.append("files that were not committed: the manifest says that there were some, not what was in them")
    seeds = _seeds(one), _seeds(other)
    histories = one.history_or_start(), other.history_or_start()
    common = sorted(_by_step(histories[0]).keys() & _by_step(histories[1]).keys())
    names = [*CURVES, *figure_names(histories[0])]
    curves = [found for name in names if (found := part(name, *histories))]
    same = seeds[0] == seeds[1] if all(seeds) else None
    return Differences(changes, unknown, same, len(common), find_unequal(*histories), curves)


def changed(first: Mapping[str, object], second: Mapping[str, object]) -> list[Change]:
    return [Change(name, *values) for name, values in differing((first, second)).items()]


def differing(settings: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return the values of each name that is not the same in all mappings; None where it is missing."""
    names = sorted({name for one in settings for name in one})
    values = {name: [one.get(name) for one in settings] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def find_unequal(one: History, other: History) -> tuple[int, list[str]] | None:
    """Return the first common step with different numbers, and their names.

    Times and rates are ignored, and evaluations (`r1 eval --watch`) of one run only.
    """
    first, second = _by_step(one), _by_step(other)
    for step in sorted(first.keys() & second.keys()):
        names = sorted(first[step].keys() | second[step].keys())
        unequal = [
            name
            for name in names
            if not name.startswith(CLOCKED)
            and not (name.startswith(EVALUATED) and (name in first[step]) != (name in second[step]))
            and not _identical(first[step].get(name), second[step].get(name))
        ]
        if unequal:
            return step, unequal
    return None


def part(name: str, one: History, other: History) -> Curve | None:
    """Return the first window whose means differ by more than `ERRORS` standard errors, or the last one.

    Noise is estimated from successive differences, so that a trend is not noise. None below two common windows, and for
    values too large to square.
    """
    first, second = dict(one.series(name)), dict(other.series(name))
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
    return np.lib.stride_tricks.sliding_window_view(values, size).mean(axis=-1)


def _variance(values: npt.NDArray[np.float64]) -> np.float64:
    return np.float64(np.mean(np.square(np.diff(values))) / 2)


def _seeds(run: RunReader) -> dict[str, object]:
    settings = run.flat_start("config") | run.flat_settings()
    return {name: settings[name] for name in ("data.seed", "worker.rollout.seed") if name in settings}


def _by_step(history: History) -> dict[int, dict[str, float]]:
    return {int(row["step"]): row for row in history.steps}


def _identical(first: float | None, second: float | None) -> bool:
    both_odd = first is not None and second is not None and first != first and second != second
    return first == second or both_odd


def format_differences(found: Differences) -> Iterator[str]:
    """Yield lines of at most `WIDTH` columns without control characters."""
    for section, changes in found.changes.items():
        if not changes:
            continue
        yield f"{section}: {len(changes)} differ"
        for one in changes[:MOST]:
            yield _line(one.name, _short(one.first), _short(one.second))
        if len(changes) > MOST:
            yield f"  and {len(changes) - MOST} more: --json has all"
    yield from (f"not known: {one}" for one in found.unknown)
    if not any(found.changes.values()) and not found.unknown:
        yield "settings, rows, code, packages and machine are the same"
    yield _say_equal(found)
    for curve in found.curves:
        how = "parts at" if curve.parts else "together to"
        steps = f"{how} step {curve.begin if curve.parts else curve.end}"
        means = f"{curve.first:.5g} and {curve.second:.5g}, ± {curve.error:.2g}"
        yield _crop(f"  {set_cell_size(curve.name, 28)}{steps:<26}{means}")


def _say_equal(found: Differences) -> str:
    if not found.steps:
        return "no step that both have"
    if found.unequal is None:
        return f"numbers: identical in all {found.steps} records that both have (times and rates aside)"
    step, names = found.unequal
    seeds = {True: "the same seeds", False: "other seeds", None: "seeds not known"}[found.same_seeds]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return _crop(f"numbers ({seeds}): the first that differ are of step {step}: {', '.join(names[:2])}{more}")


def _line(name: str, first: str, second: str) -> str:
    name = visible(name)
    shown = name if cell_len(name) <= NAME else "…" + name[-NAME + 1 :]
    room = (WIDTH - NAME - 8) // 2
    return f"  {set_cell_size(shown, NAME)}  {set_cell_size(_tail(first, room), room)}  {_tail(second, room)}".rstrip()


def _tail(text: str, room: int) -> str:
    """Return a text in `room` columns without its middle: paths differ at their ends, lists at their beginnings."""
    if cell_len(text) <= room:
        return text
    half = (room - 1) // 2
    return set_cell_size(text[:half], half).rstrip() + "…" + text[-half // 2 :]


def _crop(text: str) -> str:
    text = visible(text)
    return text if cell_len(text) <= WIDTH else set_cell_size(text, WIDTH - 1) + "…"


def _short(value: object) -> str:
    if value is None:
        return "—"
    return visible((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).replace("\n", " "))
