"""Renderings that are under way before they are asked for, as many as the memory for them holds."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from r1_data.render import Renderer
from r1_data.types import DataError, Example, Prompt
from r1_data.vision import Pixels
from r1_data.workers.pool import Workers

_BYTES_PER_TOKEN = 25_000  # of a picture: 4 patches of 2 × 3 × 16 × 16 floats

# Renders a row with media in another place, which keeps the model's inputs. It is given what tells the row from all
# others, the memory that it belongs to first, and the row's number last; the future raises as `Renderer.render` does.
Elsewhere = Callable[[tuple[int, int, int], Example], Future[Prompt]]


@dataclass(frozen=True, slots=True)
class Job:
    """A rendering to be made: of which row, how to begin it, and how long its prompt is."""

    key: Any  # equal for the same row of the same data set
    start: "Callable[[], Future[Prompt]]"
    tokens: int


def start_rendering(
    example: Example,
    renderer: Renderer,
    workers: Workers | None,
    finish: Callable[[Example, Pixels], Prompt] | None = None,
) -> "Future[Prompt]":
    """Begin to render: media are decoded in a worker, which holds the renderer; all else is done at once.

    `finish` makes the prompt of the decoded media, in a thread of this process; by default `Renderer.render`.
    The future raises DataError as `Renderer.render` does, and WorkerDied.
    """
    finish = finish or renderer.render
    if example.media and workers is not None:
        # Pixels of 8 bits travel; the model's inputs, eight times as large, are made from them here.
        return workers.submit("load", replace(example, metadata={}), then=partial(finish, example))
    return rendered(lambda: finish(example, renderer.load(example)))


def rendered(render: Callable[[], Prompt]) -> "Future[Prompt]":
    """Render now; the future holds the prompt or the DataError."""
    future: Future[Prompt] = Future()
    try:
        future.set_result(render())
    except DataError as error:
        return failed(error)
    return future


def failed(error: DataError) -> "Future[Prompt]":
    """A rendering that came to nothing."""
    future: Future[Prompt] = Future()
    future.set_exception(error)
    return future


class Ahead:
    """Starts renderings in the order of a plan; what is taken makes room for the next."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._planned: deque[Job] = deque()
        self._running: dict[Any, tuple[Future[Prompt], int]] = {}  # key -> (its rendering, bytes it may take)

    @property
    def bytes(self) -> int:
        """What the renderings under way, and those that wait to be taken, may take."""
        return sum(size for _, size in self._running.values())

    def plan(self, jobs: Iterable[Job]) -> None:
        """Make these renderings next; what was planned before and is not among them is forgotten."""
        wanted = {job.key: job for job in jobs}
        for key in self._running.keys() - wanted.keys():
            self._running.pop(key)[0].cancel()
        self._planned = deque(job for job in wanted.values() if job.key not in self._running)
        self._fill()

    def take(self, key: Any, start: "Callable[[], Future[Prompt]]") -> "Future[Prompt]":
        """The rendering of a row, started now if it is not under way."""
        future, _ = self._running.pop(key, (None, 0))
        if future is None:
            self._planned = deque(job for job in self._planned if job.key != key)
            future = start()
        self._fill()
        return future

    def _fill(self) -> None:
        taken = self.bytes
        while self._planned and taken + self._planned[0].tokens * _BYTES_PER_TOKEN <= self._max_bytes:
            job = self._planned.popleft()
            self._running[job.key] = (job.start(), job.tokens * _BYTES_PER_TOKEN)
            taken += job.tokens * _BYTES_PER_TOKEN
