"""Write checkpoints in a thread while the next step runs."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from r1_cli.checkpoint.background import Background
from r1_cli.checkpoint.folders import CheckpointError, Draft, Store

log = logging.getLogger("r1")

AGAIN = "%s\n  the run goes on, and saves again after each step; %d failures in a row end it (trainer.max_failed_saves)"

Result = TypeVar("Result")
Ended = Callable[[str, float, float], None]  # called with name, begin and end of each stage


class Saver:
    """Writes checkpoints into a store, one at a time.

    A failed one is logged by the next call, and `due` asks for another after the next step. The run ends by the error
    of the last of `most_failed` in a row.
    """

    def __init__(
        self,
        store: Store,
        ended: Ended = lambda name, begin, end: None,
        most_failed: int = 1,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """`published` is called after each checkpoint."""
        self._published = published
        self._store, self._ended, self._most_failed = store, ended, most_failed
        self._failed = 0  # in a row
        self._thread = Background("r1-saving", room=2)
        self._draft: Future[Draft] | None = None
        self._pending: Future[Any] | None = None

    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any], *, apart: bool) -> None:
        """Write a checkpoint that `publish` renames later; see `CheckpointStore.write`.

        Args:
            apart: whether `save` may run in a thread, as nothing changes what it writes.

        Raises:
            CheckpointError: the checkpoint before could not be written, as too many before it.
        """
        self.finish()
        work = partial(self._timed, "write_checkpoint", partial(self._store.write, step, save, state))
        if apart:
            self._draft = self._thread.do(work)
        else:
            self._draft = Future()
            try:
                self._draft.set_result(work())
            except CheckpointError as error:  # `finish` counts it
                self._draft.set_exception(error)
        self._pending = self._draft

    def publish(self, recorded: Callable[[], None]) -> None:
        """Publish the written checkpoint after `recorded` has returned, which waits for the run's records."""
        assert self._draft is not None, "nothing was written"
        draft, self._draft = self._draft, None

        def work() -> None:
            written = draft.result()
            recorded()
            self._store.publish(written)
            self._published()

        self._pending = self._thread.do(partial(self._timed, "publish", work))

    def check(self) -> None:
        if self._pending is not None and self._pending.done():
            self.finish()

    @property
    def due(self) -> bool:
        """Whether the latest checkpoint could not be written, so that the next step is saved."""
        return self._failed > 0

    def finish(self, *, last: bool = False) -> None:
        """Wait for the current checkpoint.

        Args:
            last: no step follows, so that one failure is too many.

        Raises:
            CheckpointError: it could not be written, nor could those before it.
            Exception: groups that it should hold could not be sampled.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError as error:
            self._failed += 1
            if last or self._failed >= self._most_failed:
                raise
            if self._failed == 1:
                log.warning(AGAIN, error, self._most_failed)
            return
        if self._failed:
            log.warning("checkpoints are written again, after %d that were not", self._failed)
        self._failed = 0

    def finish_or_warn(self) -> None:
        """Wait for the current checkpoint and log its error, when the run ends for another reason."""
        try:
            self.finish(last=True)
        except Exception as error:
            log.warning("a checkpoint that was being written is not there: %s", error)

    def close(self) -> None:
        self._thread.close()

    def _timed(self, name: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self._ended(name, begin, time.perf_counter())
