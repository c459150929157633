"""Read the numbers in a run's log incrementally, as it grows."""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from r1_cli.runs.history import NoHistoryError, find_logs, read_line, read_trl


class Increment(TypedDict):
    """New steps of a log: the number of the next one, and the count of restarts."""

    rows: list[dict[str, float | None]]
    next: int
    times: int


class Curves:
    def __init__(self, run: Path) -> None:
        self._run, self._lock = run, threading.Lock()
        self._rows: list[dict[str, float | None]] = []
        self._read: dict[Path, tuple[tuple[int, ...], int]] = {}  # what file, and the bytes of it that have been read
        self._file: tuple[int, ...] | None = None  # TRL's, as it was read
        self._times = 0  # that the log was begun anew

    def read(self, after: int = 0, times: int = 0) -> Increment:
        """Return {"rows", "next", "times"} for the rows from number `after`.

        A step that was evaluated later has a further row, with the same step. All rows are returned if the log was
        restarted since the caller's `times`. Incomplete lines wait, lines without a step are skipped, and nonfinite
        values are None.
        """
        with self._lock:
            with suppress(NoHistoryError, FileNotFoundError):
                paths = find_logs(self._run)
                self._read_whole(paths[0]) if paths[0].suffix == ".json" else self._read_on(paths)
            begin = max(after, 0) if times == self._times else 0
            return {"rows": self._rows[begin:], "next": len(self._rows), "times": self._times}

    def _read_on(self, paths: Sequence[Path]) -> None:
        """Read what was appended to the files; all of it if one is gone, is another one or has become shorter."""
        if any(path not in paths or self._began_anew(path) for path in self._read):
            self._times += 1
            self._rows, self._read = [], {}
        for path in paths:
            with path.open("rb") as file:
                status, place = path.stat(), self._read.get(path, ((), 0))[1]
                file.seek(place)
                whole = file.read()
            whole = whole[: whole.rfind(b"\n") + 1]
            self._read[path] = (status.st_dev, status.st_ino), place + len(whole)
            self._rows += [_finite(found[1]) for line in whole.splitlines() if (found := read_line(line))]

    def _began_anew(self, path: Path) -> bool:
        status, (identity, place) = path.stat(), self._read[path]
        return identity != (status.st_dev, status.st_ino) or status.st_size < place

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
