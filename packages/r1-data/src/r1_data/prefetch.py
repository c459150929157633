"""Render rows ahead of time: decoded media and pending renderings are kept in memory, both within a bound.

A dataset passes `RenderJob`s to a `PromptMemory`, which starts them in order by their `RowRenderer`; nothing calls back
into the dataset.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from r1_data.types import Conversation, DataError, Example, Item, Prompt, Rendered
from r1_data.vision import Pixels
from r1_data.workers.pool import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item", bound=Example | Conversation, contravariant=True)
_Rendered = TypeVar("_Rendered", covariant=True)
_BYTES_PER_TOKEN = 25_000  # of a picture: 4 patches of 2 × 3 × 16 × 16 floats

# Renders a row with media on another machine, which keeps the model's inputs. The key is unique for each row of a run:
# its memory, its data set, its row number. The future raises as `Renderer.render` does.
RemoteRenderer = Callable[[tuple[int, int, int], Example], Future[Prompt]]


class ItemRenderer(Protocol[_Item, _Rendered]):
    """Renders what rows are read to: `Renderer` examples, `ConversationRenderer` conversations."""

    tokenizer: "PreTrainedTokenizerBase"

    def measure(self, items: Sequence[_Item], limit: int | None = None, /) -> list[int | DataError]:
        """Return lengths in tokens, or errors, without decoding media; `Overlong` is certainly over `limit`."""

    def load(self, item: _Item, /) -> Pixels: ...
    def render(self, item: _Item, pixels: Pixels | None = None, /) -> _Rendered: ...
    def count_values(self, item: _Item, /) -> int: ...
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RenderJob(Generic[Rendered]):
    renderer: "RowRenderer[Any, Rendered]"
    row: int
    tokens: int  # of its rendering, media included

    @property
    def bytes(self) -> int:
        return self.tokens * _BYTES_PER_TOKEN


class PromptMemory:
    """Decoded media and pending renderings of a run, both bounded.

    Media of the rows read first stay until the end: a new epoch needs the latest row last.
    """

    def __init__(self, max_bytes: int = 2**30, *, ahead_bytes: int = 2**28) -> None:
        """`max_bytes` bounds the resized 8-bit pixels, `ahead_bytes` what is being rendered or not yet read."""
        self.bytes = 0  # of pixels
        self._max_bytes, self._ahead_bytes, self._lock = max_bytes, ahead_bytes, threading.Lock()
        self._pixels: dict[Hashable, Pixels] = {}
        self._planned: deque[RenderJob[Any]] = deque()
        self._pending: dict[RenderJob[Any], Future[Any]] = {}

    def __reduce__(self) -> "tuple[Callable[[int, int], PromptMemory], tuple[int, int]]":
        return _empty_memory, (self._max_bytes, self._ahead_bytes)

    @property
    def pending_bytes(self) -> int:
        return sum(job.bytes for job in self._pending)

    def prefetch(self, jobs: Iterable[RenderJob[Any]]) -> None:
        """Render these rows next, in this order. Earlier jobs that are not among them are cancelled."""
        planned = dict.fromkeys(jobs)
        for job in self._pending.keys() - planned.keys():
            self._pending.pop(job).cancel()
        self._planned = deque(job for job in planned if job not in self._pending)
        self._start_planned()

    def render(self, job: RenderJob[Rendered]) -> "Future[Rendered]":
        """Return the pending rendering of a row, or start it. The future raises as `Renderer.render` does."""
        future: Future[Rendered] | None = self._pending.pop(job, None)
        if future is None:
            if job in self._planned:
                self._planned.remove(job)
            future = job.renderer.start(job.row)
        self._start_planned()
        return future

    def get_pixels(self, key: Hashable) -> Pixels | None:
        return self._pixels.get(key)

    def add_pixels(self, key: Hashable, pixels: Pixels) -> None:
        size = sum(tensor.nbytes for tensor in (*pixels.images, *pixels.videos))
        with self._lock:
            if 0 < size <= self._max_bytes - self.bytes and key not in self._pixels:
                self._pixels[key] = pixels
                self.bytes += size

    def _start_planned(self) -> None:
        size = self.pending_bytes
        while self._planned and size + self._planned[0].bytes <= self._ahead_bytes:
            job = self._planned.popleft()
            self._pending[job] = job.renderer.start(job.row)
            size += job.bytes


class RowRenderer(Generic[Item, Rendered]):
    """Renders rows on another machine, in worker processes, or in this thread."""

    def __init__(
        self,
        rows: Sequence[tuple[str, Mapping[str, object]]],
        reader: Callable[[str, Mapping[str, object]], Item],
        renderer: ItemRenderer[Item, Rendered],
        memory: PromptMemory,
        *,
        workers: Workers | None = None,
        remote: Callable[[tuple[int, int, int], Item], "Future[Rendered]"] | None = None,
    ) -> None:
        """`workers` hold `renderer`; `remote` renders rows with media instead of this process and `memory`."""
        self._rows, self._reader, self._renderer, self._memory = rows, reader, renderer, memory
        self._workers, self._remote = workers, remote
        self.concurrent = workers is not None or remote is not None  # whether rendering ahead saves time

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_workers": None, "_remote": None, "concurrent": False}

    def read(self, row: int) -> Item:
        return self._reader(*self._rows[row])

    def start(self, row: int) -> "Future[Rendered]":
        """Start rendering a row, from decoded media if in memory."""
        try:
            example = self.read(row)
        except DataError as error:
            return _failed(error)
        if example.media and self._remote is not None:
            return self._remote((id(self._memory), id(self), row), example)
        key = (self, row)
        pixels = self._memory.get_pixels(key)
        if pixels is None:
            return start_rendering(example, self._renderer, self._workers, partial(self._memory.add_pixels, key))
        render = partial(self._renderer.render, example, pixels)
        return _run(render) if self._workers is None else self._workers.compute(render)


def start_rendering(
    example: Item,
    renderer: ItemRenderer[Item, Rendered],
    workers: Workers | None,
    decoded: Callable[[Pixels], None] | None = None,
) -> "Future[Rendered]":
    """Start rendering an example, in a worker if there are any. `decoded` is called with the pixels.

    The future raises DataError as `Renderer.render` does, and WorkerDied.
    """

    def finish(pixels: Pixels | None = None) -> Rendered:
        pixels = renderer.load(example) if pixels is None else pixels
        if decoded is not None:
            decoded(pixels)
        return renderer.render(example, pixels)

    if example.media and workers is not None:
        # The worker returns 8-bit pixels. The model's inputs, eight times as large, are computed from them here.
        return workers.submit("load", example.as_asked(), then=finish)
    return _run(finish)


def _run(render: Callable[[], Rendered]) -> "Future[Rendered]":
    future: Future[Rendered] = Future()
    try:
        future.set_result(render())
    except DataError as error:
        return _failed(error)
    return future


def _failed(error: DataError) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _empty_memory(max_bytes: int, ahead_bytes: int) -> PromptMemory:
    return PromptMemory(max_bytes, ahead_bytes=ahead_bytes)
