"""Renderings that are under way before they are asked for, as many as the memory for them holds."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from r1_data.types import Prompt

_BYTES_PER_TOKEN = 25_000  # of a picture: 4 patches of 2 × 3 × 16 × 16 floats


class Ahead:
    """Starts renderings in the order of a plan; what is taken makes room for the next."""

    def __init__(self, start: "Callable[[int], Future[Prompt]]", max_bytes: int) -> None:
        self._start, self._max_bytes = start, max_bytes
        self._planned: deque[tuple[int, int]] = deque()  # (row, tokens)
        self._running: dict[int, tuple[Future[Prompt], int]] = {}  # row -> (its rendering, bytes it may take)

    def plan(self, rows: Iterable[tuple[int, int]]) -> None:
        """Render these (row, tokens) next; what was planned before and is not among them is forgotten."""
        wanted = dict(rows)
        for row in self._running.keys() - wanted.keys():
            self._running.pop(row)[0].cancel()
        self._planned = deque((row, tokens) for row, tokens in wanted.items() if row not in self._running)
        self._fill()

    def take(self, row: int) -> "Future[Prompt]":
        """The rendering of a row, started now if it is not under way."""
        future, _ = self._running.pop(row, (None, 0))
        if future is None:
            self._planned = deque(item for item in self._planned if item[0] != row)
            future = self._start(row)
        self._fill()
        return future

    def _fill(self) -> None:
        taken = sum(size for _, size in self._running.values())
        while self._planned and taken + self._planned[0][1] * _BYTES_PER_TOKEN <= self._max_bytes:
            row, tokens = self._planned.popleft()
            self._running[row] = (self._start(row), tokens * _BYTES_PER_TOKEN)
            taken += tokens * _BYTES_PER_TOKEN
