"""Measure the wall time of each stage of a step."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from r1_cli.runs.track.timeline import Record

Item = TypeVar("Item")


class Stopwatch:
    """Sums wall time by stage. Example: `with watch("gen"): …`, then `watch.lap() == {"gen": 1.9}`.

    `begun(stage)` is called when a stage begins, `ended` with its times at its end.
    """

    def __init__(self, begun: Callable[[str], None] | None = None, ended: Record | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._begun, self._ended = begun, ended

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        if self._begun is not None:
            self._begun(stage)
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + end - start
            if self._ended is not None:
                self._ended(stage, start, end)

    @contextmanager
    def background(self, what: str) -> Iterator[None]:
        """Report the block, in any thread, to `ended` without counting it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._ended is not None:
                self._ended(what, start, time.perf_counter())

    def each(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items` and count the time to produce them, without the loop's body."""
        iterator = iter(items)
        while True:
            with self(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def lap(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
