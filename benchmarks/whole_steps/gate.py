"""A side's end of the pipe: it steps when it is told to, and says what each step took."""

import json
import os
import sys
import time
from typing import Any


class Gate:
    """Between the steps of a trainer. What it prints by itself goes where errors go."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._steps: list[dict[str, Any]] = []
        self._wanted, self._opened, self._start = 0, False, 0.0

    def open(self) -> None:
        """Wait for the first turn; later calls do nothing."""
        if not self._opened:
            self._opened = True
            self._say({"ready": True})
            self._wait()

    def passed(self, **facts: Any) -> None:
        """A step has ended. Wait where it was the last of the turn.

        Raises SystemExit where no turn is to come.
        """
        self._steps.append({"seconds": time.perf_counter() - self._start, **facts})
        if len(self._steps) < self._wanted:
            self._start = time.perf_counter()
            return
        self._say({"steps": self._steps})
        self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line.strip():
            raise SystemExit(0)
        self._wanted, self._steps, self._start = int(line), [], time.perf_counter()

    def _say(self, reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=self._replies, flush=True)
