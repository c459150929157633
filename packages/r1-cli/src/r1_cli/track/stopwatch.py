"""How long each stage of a step took."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Stopwatch:
    """Adds up wall time by stage. Example: `with watch("gen"): …`, then `watch.lap() == {"gen": 1.9}`.

    `begun` is told of each stage when it begins.
    """

    def __init__(self, begun: Callable[[str], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._begun = begun

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        if self._begun is not None:
            self._begun(stage)
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def each(self, stage: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`, adding up what they take to come, and not what is done with them in between."""
        iterator = iter(items)
        while True:
            with self(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def lap(self) -> dict[str, float]:
        """Return the seconds of each stage since the last lap, and begin anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
