"""Saving beside the run: a checkpoint is written in a thread while the next step goes on, one at a time."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from r1_cli.checkpoint.background import Background
from r1_cli.checkpoint.folders import CheckpointStore, Draft

log = logging.getLogger("r1")

Result = TypeVar("Result")
Ended = Callable[[str, float, float], None]  # is told of what was done its name, and when it began and ended


class Saver:
    """Writes checkpoints into a store.

    At most one is under way. What becomes of it is told by the next call that would begin another, or waits for it, or
    asks: a checkpoint that could not be written ends the run by its name, and those before it are as they were.
    """

    def __init__(self, store: CheckpointStore, ended: Ended = lambda name, begin, end: None) -> None:
        self._store, self._ended = store, ended
        self._thread = Background("r1-saving", room=2)
        self._draft: Future[Draft] | None = None
        self._under_way: Future[Any] | None = None

    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any], *, apart: bool) -> None:
        """Begin to write what `publish` gives its name; see `CheckpointStore.write`.

        Args:
            apart: whether `save` writes what nobody changes, so that a thread can call it; else it is called here.

        Raises:
            CheckpointError: the one before could not be written; or this one, if not `apart`.
        """
        self.finish()
        work = partial(self._timed, "write_checkpoint", partial(self._store.write, step, save, state))
        if apart:
            self._draft = self._thread.do(work)
        else:
            self._draft = Future()
            self._draft.set_result(work())
        self._under_way = self._draft

    def publish(self, recorded: Callable[[], None]) -> None:
        """Give it its name as soon as it is written and `recorded` has returned, which waits for the run's records."""
        assert self._draft is not None, "nothing was written"
        draft, self._draft = self._draft, None

        def work() -> None:
            written = draft.result()
            recorded()
            self._store.publish(written)

        self._under_way = self._thread.do(partial(self._timed, "publish", work))

    def check(self) -> None:
        """Raise what the checkpoint under way has come to, if it has come to an error already."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: the checkpoint could not be written.
            Exception: what it was to hold could not be sampled.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def finish_or_warn(self) -> None:
        """Wait likewise where the run ends for another reason: an error is said."""
        try:
            self.finish()
        except Exception as error:
            log.warning("a checkpoint that was being written is not there: %s", error)

    def close(self) -> None:
        """Write nothing more."""
        self._thread.close()

    def _timed(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self._ended(name, begin, time.perf_counter())
