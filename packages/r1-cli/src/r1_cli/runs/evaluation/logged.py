"""The figures that `r1 eval --watch` adds to a run's log: their names, and reading them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from r1_cli.runs.history import EVALUATED, History
from r1_cli.runs.statistics import LEVEL, Interval

FIGURE = re.compile(rf"{EVALUATED}(.+)/(avg@[0-9]+)")  # the one of a set that has an interval
CHANGE = "change"  # of that figure since the start model


@dataclass(frozen=True, slots=True)
class Logged:
    """What is logged of one set of rows at a step."""

    step: int
    set: str  # SUITE/PROMPT
    figure: str  # avg@n
    value: tuple[float, float, float]  # with the ends of its 95 % interval
    change: tuple[float, float, float] | None  # since the start model, paired by rows; None: the set is not guarded
    p: float  # of the change, adjusted for the number of guarded sets (Holm); 1 without one

    @property
    def lost(self) -> bool:
        """Whether it is a significant loss: all of the interval is below 0, and the adjusted p below 5 %."""
        return self.change is not None and self.change[2] < 0 and self.p < LEVEL

    def __str__(self) -> str:
        if self.change is None:
            return f"{self.set} {self.figure} " + "{:.3f} ({:.3f} to {:.3f})".format(*self.value)
        told = "{:+.3f} ({:+.3f} to {:+.3f})".format(*self.change)
        return f"{self.set} {self.figure} is {self.value[0]:.3f}, {told} since the start, p {self.p:.3g}"


def with_interval(name: str, found: Interval) -> dict[str, float]:
    return {name: found.value, f"{name}/low": found.low, f"{name}/high": found.high}


def figure_names(history: History) -> list[str]:
    return [name for name in history.names(EVALUATED) if FIGURE.fullmatch(name)]


def read_logged(history: History) -> list[Logged]:
    """Return what a run's log has of `r1 eval --watch`, by set and step."""
    return [one for name in figure_names(history) for one in _read(history, name)]


def _read(history: History, name: str) -> Iterator[Logged]:
    match = FIGURE.fullmatch(name)
    assert match is not None
    change = f"{EVALUATED}{match[1]}/{CHANGE}"
    values, changes = ([dict(history.series(f"{of}{end}")) for end in ("", "/low", "/high")] for of in (name, change))
    p = dict(history.series(f"{change}/p"))
    for step, value in values[0].items():
        around = (value, values[1].get(step, value), values[2].get(step, value))
        since = (changes[0][step], changes[1][step], changes[2][step]) if all(step in one for one in changes) else None
        yield Logged(step, match[1], match[2], around, since, p.get(step, 1.0))
