"""What a run did when: spans of its threads, in a file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMELINE_FILE = "timeline.json"

# What is told of a span: its name, and when it began and ended by `time.perf_counter`.
Record = Callable[[str, float, float], None]


class Timeline:
    """The spans of the first steps that this process takes.

    Those of one thread nest. They are kept until the last of the steps has ended, or the run has, and then written as
    Chrome's trace events: a complete event ("X") a span, in microseconds, and a row a thread. What goes on beside the
    run and outlasts them, as a checkpoint's writing may, is not among them.
    """

    def __init__(self, path: Path | None = None, steps: int = 0) -> None:
        """Note `steps` steps for the file `path`; 0: nothing, at no cost."""
        self._path, self._left = path, steps
        self._origin = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._threads: list[str] = ["driver"]  # by their names, as a short-lived one has a new number each time

    def record(self, name: str, begin: float, end: float) -> None:
        """Note a span of the calling thread."""
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
        """Note the block as a span."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, begin, time.perf_counter())

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Note the block as a step; after the last that is wanted, write the file."""
        with self(f"step {number}"):
            yield
        if self._left == 1:
            self.close()
        self._left -= 1

    def close(self) -> None:
        """Write what there is, unless it is written."""
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
