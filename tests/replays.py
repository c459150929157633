"""Stand-ins for a GPU's graphs and late copies: a replay computes what was captured, from the addresses of then."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from r1_rollout.embedded import decoding
from r1_rollout.embedded.graphs import Action, Graphs

NOT_YET = -7  # in a buffer before its copy has come


def frozen(cache: Any) -> Any:
    """A cache as a graph knows it: the tensors that it was captured with, whatever the cache has been told since."""
    found = copy.copy(cache)
    segments: dict[int, Any] = {}

    def one(segment: Any) -> Any:
        return segments.setdefault(id(segment), copy.copy(segment))

    found._prompt_readers = [(one(segment), readers) for segment, readers in cache._prompt_readers]
    found._answer_readers = [(one(segment), readers) for segment, readers in cache._answer_readers]
    found._targets = [target._replace(segment=one(target.segment)) for target in cache._targets]
    return found


def capture(action: Any) -> Action:
    rows, cache, axes = action.args
    return partial(action.func, copy.copy(rows), frozen(cache), axes)


class Replaying(Graphs):
    made: ClassVar[list["Replaying"]] = []

    def __init__(self) -> None:
        super().__init__(capture)
        self.made.append(self)


class LateCopies:
    """Copies that come when they are waited for, and no sooner. `log` has what happened, in order."""

    log: ClassVar[list[str]] = []

    def __init__(self, size: int) -> None:
        self._buffers = [np.full(size, NOT_YET, np.int32) for _ in range(2)]

    def start(self, report: Tensor) -> Callable[[], NDArray[np.int32]]:
        self._buffers.reverse()
        buffer, now = self._buffers[0], report.detach().clone()
        buffer[:] = NOT_YET  # whoever still reads an earlier copy of this buffer finds nothing in it
        self.log.append("asked")

        def read() -> NDArray[np.int32]:
            self.log.append("read")
            buffer[: now.numel()] = (now if now.is_cpu else now.inner).numpy().ravel()  # type: ignore[operator]
            return buffer[: now.numel()].reshape(now.shape)

        return read


def stand_in(monkeypatch: pytest.MonkeyPatch, graphs: Callable[[], Graphs]) -> None:
    """Let engines with `_graphs` use these graphs, and copies that come late."""
    monkeypatch.setattr(decoding, "Graphs", graphs)
    monkeypatch.setattr(decoding, "HostCopies", LateCopies)
    LateCopies.log = []
