"""What a run holds of its prompts in memory: media that stay decoded and prompts made ahead, both bounded."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from r1_data.types import Prompt
from r1_data.vision import Pixels
from r1_data.workers.ahead import Ahead, Job


class PromptMemory:
    """The media of the rows that were read first, which stay, and the renderings that are under way.

    An epoch reads every row once, in another order each time: a row read just now is the last to be needed again, so
    to let rows leave for newer ones would only make both be decoded. Rows go by (data set, row): data sets that share
    a memory share its bounds, however many they are.
    """

    def __init__(self, max_bytes: int = 2**30, *, ahead_bytes: int = 2**28) -> None:
        """Make room: `max_bytes` for resized 8-bit pixels, `ahead_bytes` for prompts that have not been taken yet."""
        self.bytes = 0  # of pixels kept
        self._max_bytes, self._ahead_bytes, self._lock = max_bytes, ahead_bytes, threading.Lock()
        self._pixels: dict[Any, Pixels] = {}
        self._ahead = Ahead(ahead_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets an empty memory of the same bounds."""
        return _empty_memory, (self._max_bytes, self._ahead_bytes)

    def plan(self, jobs: Iterable[Job]) -> None:
        """Render these next, in this order; a plan made before, for whichever data set, is forgotten."""
        self._ahead.plan(jobs)

    def take(self, key: Any, start: "Callable[[], Future[Prompt]]") -> Prompt:
        """The prompt made ahead, or made now. Raises what its rendering raised."""
        return self._ahead.take(key, start).result()

    def pixels(self, key: Any) -> Pixels | None:
        """A row's media, if they have been kept."""
        return self._pixels.get(key)

    def keep(self, key: Any, pixels: Pixels) -> None:
        """Keep a row's media if there is room."""
        size = sum(tensor.nbytes for tensor in (*pixels.images, *pixels.videos))
        with self._lock:
            if 0 < size <= self._max_bytes - self.bytes and key not in self._pixels:
                self._pixels[key] = pixels
                self.bytes += size


def _empty_memory(max_bytes: int, ahead_bytes: int) -> PromptMemory:
    return PromptMemory(max_bytes, ahead_bytes=ahead_bytes)
