"""Write checkpoints in a thread while the next step runs."""

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
Ended = Callable[[str, float, float], None]  # called with name, begin and end of each stage


class Saver:
    """Writes checkpoints into a store, one at a time. The next call raises the error of a failed one."""

    def __init__(self, store: CheckpointStore, ended: Ended = lambda name, begin, end: None) -> None:
        self._store, self._ended = store, ended
        self._thread = Background("r1-saving", room=2)
        self._draft: Future[Draft] | None = None
        self._pending: Future[Any] | None = None

    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any], *, apart: bool) -> None:
        """Write a checkpoint that `publish` renames later; see `CheckpointStore.write`.

        Args:
            apart: whether `save` may run in a thread, as nothing changes what it writes.

        Raises:
            CheckpointError: the checkpoint before could not be written; or this one, if not `apart`.
        """
        self.finish()
        work = partial(self._timed, "write_checkpoint", partial(self._store.write, step, save, state))
        if apart:
            self._draft = self._thread.do(work)
        else:
            self._draft = Future()
            self._draft.set_result(work())
        self._pending = self._draft

    def publish(self, recorded: Callable[[], None]) -> None:
        """Publish the written checkpoint after `recorded` has returned, which waits for the run's records."""
        assert self._draft is not None, "nothing was written"
        draft, self._draft = self._draft, None

        def work() -> None:
            written = draft.result()
            recorded()
            self._store.publish(written)

        self._pending = self._thread.do(partial(self._timed, "publish", work))

    def check(self) -> None:
        if self._pending is not None and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the current checkpoint.

        Raises:
            CheckpointError: it could not be written.
            Exception: groups that it should hold could not be sampled.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish_or_warn(self) -> None:
        """Wait for the current checkpoint and log its error, when the run ends for another reason."""
        try:
            self.finish()
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
