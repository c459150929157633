"""Time the stages of a step, and trace a run's threads in a file for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from r1_cli.runs.history import JsonObject

TIMELINE_FILE = "timeline.json"

# What is told of a span: its name, and when it began and ended by `time.perf_counter`.
Record = Callable[[str, float, float], None]


Item = TypeVar("Item")


class Timeline:
    """The spans of this process's first steps, nested within each thread.

    They are written after these steps, or at the end of the run, as Chrome's complete trace events ("X", in
    microseconds), a row per thread. Spans that end later, such as the writing of a checkpoint, are missing.
    """

    def __init__(self, path: Path | None = None, steps: int = 0) -> None:
        """Trace `steps` steps into the file `path`; with 0, nothing, at no cost."""
        self._path, self._left = path, steps
        self._origin = time.perf_counter()
        self._events: list[JsonObject] = []
        self._threads: list[str] = ["driver"]  # by their names, as a short-lived one has a new number each time

    def record(self, name: str, begin: float, end: float) -> None:
        if self._left <= 0:
            return
        current = threading.current_thread()
        name_of = "driver" if current is threading.main_thread() else current.name
        if name_of not in self._threads:
            self._threads.append(name_of)
        thread = self._threads.index(name_of)
        times = {"ts": 1e6 * (begin - self._origin), "dur": 1e6 * (end - begin)}
        self._events.append({"name": name, "ph": "X", "pid": os.getpid(), "tid": thread, **times})

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, begin, time.perf_counter())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block as a step; write the file after the last one."""
        with self(f"step {number}"):
            yield
        if self._left == 1:
            self.close()
        self._left -= 1

    def close(self) -> None:
        if self._path is None or not self._events:
            return
        rows = [
            {"name": kind, "ph": "M", "pid": os.getpid(), "tid": thread, "args": {key: value}}
            for thread, name in enumerate(self._threads)
            for kind, key, value in (("thread_name", "name", name), ("thread_sort_index", "sort_index", thread))
        ]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"traceEvents": rows + self._events, "displayTimeUnit": "ms"}) + "\n")
        self._events = []


@dataclass(slots=True)
class Stopwatch:
    """Sums wall time by stage. Example: `with watch("gen"): …`, then `watch.lap() == {"gen": 1.9}`."""

    begun: Callable[[str], None] | None = None  # called with a stage when it begins
    ended: Record | None = None  # called with a stage's times at its end
    _seconds: dict[str, float] = field(default_factory=dict, init=False)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.begun is not None:
            self.begun(stage)
        try:
            yield
        finally:
            end = time.perf_counter()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + end - start
            if self.ended is not None:
                self.ended(stage, start, end)

    @contextmanager
    def background(self, what: str) -> Iterator[None]:
        """Report the block, in any thread, to `ended` without counting it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.ended is not None:
                self.ended(what, start, time.perf_counter())

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
