"""Read the numbers in a run's log incrementally, as it grows."""

import json
import math
import threading
from pathlib import Path
from typing import Any, TypedDict

from r1_cli.runs.history import LOG_FILE


class Increment(TypedDict):
    """New steps of a log: the number of the next one, and the count of restarts."""

    rows: list[dict[str, float | None]]
    next: int
    times: int


class Curves:
    def __init__(self, run: Path) -> None:
        self._path, self._lock = run / LOG_FILE, threading.Lock()
        self._rows: list[dict[str, float | None]] = []
        self._place = 0  # bytes that have been read
        self._file: tuple[int, int] | None = None
        self._times = 0  # that the log was begun anew

    def read(self, after: int = 0, times: int = 0) -> Increment:
        """Return {"rows", "next", "times"} for the steps from number `after`.

        All steps are returned if the log was restarted since the caller's `times`. Incomplete lines wait, lines without
        a step are skipped, and nonfinite values are None.
        """
        with self._lock:
            self._read_on()
            begin = max(after, 0) if times == self._times else 0
            return {"rows": self._rows[begin:], "next": len(self._rows), "times": self._times}

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if self._file != (status.st_dev, status.st_ino) or status.st_size < self._place:
                    self._times += self._file is not None
                    self._rows, self._place, self._file = [], 0, (status.st_dev, status.st_ino)
                file.seek(self._place)
                whole = file.read()
        except FileNotFoundError:
            return
        whole = whole[: whole.rfind(b"\n") + 1]
        self._place += len(whole)
        self._rows += [row for line in whole.splitlines() if (row := _row(line))]


def _row(line: bytes) -> dict[str, float | None] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not _is_number(found.get("step")):
        return None
    return {name: _finite(value) for name, value in found.items() if _is_number(value) or value is None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    return value if _is_number(value) and abs(value) < 2**1023 and math.isfinite(value) else None
