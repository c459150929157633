"""Checkpoints that ranks write while they train: each copies its own files, and a thread writes them."""

import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from r1_cli.checkpoint.background import Background
from r1_cli.cluster.worker_group import WorkerGroup
from r1_core.learner.checkpoint import Snapshot

POLL_SECONDS = 0.2  # a rank that computes answers afterwards


class SnapshotWriter:
    def __init__(self) -> None:
        self._taken: dict[str, Snapshot] = {}
        self._written: dict[str, Future[None]] = {}
        self._thread = Background("r1-saving", room=2)

    def add(self, owner: str, taken: Snapshot | None) -> bool:
        if taken is not None:
            self._taken[owner] = taken
        return taken is not None

    def write(self, owner: str, folder: Path) -> None:
        self._written[owner] = self._thread.do(partial(self._taken.pop(owner).write, folder))

    def wait(self) -> None:
        """Wait until no file of a checkpoint is being written."""
        wait(self._written.values())

    def error(self, owner: str) -> str | None:
        """Return why it could not be written; "" once it is written, None before."""
        written = self._written[owner]
        if not written.done():
            return None
        error = written.exception()
        return "" if error is None else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class RankedSnapshot:
    ranks: WorkerGroup
    owner: str

    def write(self, folder: Path) -> None:
        """Write the snapshot on the ranks, polling them between their other calls.

        Raises:
            OSError: a rank could not write; the others have.
        """
        self.ranks.call("write_snapshot", self.owner, folder)
        while None in (failures := self.ranks.call_all("snapshot_error", self.owner)):
            time.sleep(POLL_SECONDS)
        for rank, error in enumerate(failures):
            if error:
                raise OSError(f"rank {rank}: {error}")
