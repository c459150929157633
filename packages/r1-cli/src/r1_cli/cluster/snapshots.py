"""Checkpoints that ranks write while they train: each copies its own files, and a thread of it writes them."""

import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from r1_cli.checkpoint.background import Background
from r1_cli.cluster.worker_group import WorkerGroup
from r1_core.learner.checkpoint import Snapshot

ASKED_EVERY = 0.2  # seconds; while a rank computes it answers afterwards


class SnapshotWriter:
    """A rank's copies of what it trains, by whose they are: at most one of each."""

    def __init__(self) -> None:
        self._taken: dict[str, Snapshot] = {}
        self._written: dict[str, Future[None]] = {}
        self._thread = Background("r1-saving", room=2)

    def keep(self, owner: str, taken: Snapshot | None) -> bool:
        """Keep a copy until it is written; say whether there is one."""
        if taken is not None:
            self._taken[owner] = taken
        return taken is not None

    def write(self, owner: str, folder: Path) -> None:
        """Begin to write a copy, which is let go of then."""
        self._written[owner] = self._thread.do(partial(self._taken.pop(owner).write, folder))

    def failure(self, owner: str) -> str | None:
        """Return why it could not be written, "" if it is; None as long as that is not known."""
        written = self._written[owner]
        if not written.done():
            return None
        error = written.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class RankedSnapshot:
    """The `Snapshot` of `r1_cli.train.roles` that ranks have, each its part."""

    ranks: WorkerGroup
    owner: str

    def write(self, folder: Path) -> None:
        """Let the ranks write, between whose verbs they are asked whether they have.

        Raises:
            OSError: one could not; the others have written theirs.
        """
        self.ranks.call("write_snapshot", self.owner, folder)
        while None in (failures := self.ranks.call_all("snapshot_error", self.owner)):
            time.sleep(ASKED_EVERY)
        for rank, failure in enumerate(failures):
            if failure:
                raise OSError(f"rank {rank}: {failure}")
