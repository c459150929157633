"""Read the numbers in a run's log incrementally, as it grows."""

import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from r1_cli.runs.history import NoHistoryError, find_log, read_line, read_trl


class Increment(TypedDict):
    """New steps of a log: the number of the next one, and the count of restarts."""

    rows: list[dict[str, float | None]]
    next: int
    times: int


class Curves:
    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._rows: list[dict[str, float | None]] = []
        self._place = 0  # bytes that have been read
        self._file: tuple[int, ...] | None = None
        self._times = 0  # that the log was begun anew

    def read(self, after: int = 0, times: int = 0) -> Increment:
        """Return {"rows", "next", "times"} for the steps from number `after`.

        All steps are returned if the log was restarted since the caller's `times`. Incomplete lines wait, lines without
        a step are skipped, and nonfinite values are None.
        """
        with self._lock:
            with suppress(NoHistoryError, FileNotFoundError):
                path = find_log(self._run)
                self._read_whole(path) if path.suffix == ".json" else self._read_on(path)
            begin = max(after, 0) if times == self._times else 0
            return {"rows": self._rows[begin:], "next": len(self._rows), "times": self._times}

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            status = path.stat()
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._place:
                self._times += self._file is not None
                self._rows, self._place, self._file = [], 0, (status.st_dev, status.st_ino)
            file.seek(self._place)
            whole = file.read()
        whole = whole[: whole.rfind(b"\n") + 1]
        self._place += len(whole)
        self._rows += [_finite(found[1]) for line in whole.splitlines() if (found := read_line(line))]

    def _read_whole(self, path: Path) -> None:
        """Read TRL's file, which is written anew."""
        status = path.stat()
        if self._file == (changed := (status.st_dev, status.st_ino, status.st_mtime_ns)):
            return
        if steps := read_trl(path):
            self._times += self._file is not None
            self._rows, self._file = [_finite(step) for step in steps], changed


def _finite(row: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the row with None for each number that is not finite, or too large for a chart."""
    return {
        name: value if value is not None and abs(value) < 2**1023 and math.isfinite(value) else None
        for name, value in row.items()
    }
