"""Copies of a run's state on the machine's RAM disk, which outlive the run's processes, though not the machine."""

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.saving import Ended, Saver

RAM_DISK = Path("/dev/shm")
PREFIX = "r1-copies-"
POINTER = "memory_copies.txt"  # in the run's folder: where its copies are
OWNER = "run.txt"  # among the copies: the run's folder
KEPT = 2  # copies, beside the one that is being written
SHARE = 3  # of free memory: a copy may take one part, its files another

log = logging.getLogger("r1")


def find_copies(run: Path) -> Path | None:
    """Return the folder with a run's copies, if this user made it for this run."""
    try:
        folder = Path((run / POINTER).read_text(encoding="utf-8").strip())
    except OSError:
        return None
    return folder if _owner(folder) == run.resolve() else None


def _owner(folder: Path) -> Path | None:
    """Return the run of a folder of copies; None if it is another user's, or open to others."""
    try:
        state = folder.lstat()
        private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077
        return Path((folder / OWNER).read_text(encoding="utf-8")) if private else None
    except OSError:
        return None


def make_copies(run: Path) -> Path:
    """Make a private folder for a run's copies. Raises OSError."""
    for folder in RAM_DISK.glob(f"{PREFIX}*"):  # of runs whose folders are gone
        if (owner := _owner(folder)) is not None and find_copies(owner) != folder:
            shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=RAM_DISK))
    (folder / OWNER).write_text(str(run.resolve()), encoding="utf-8")
    (run / POINTER).write_text(f"{folder}\n", encoding="utf-8")
    return folder


def remove_copies(run: Path) -> None:
    if (folder := find_copies(run)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        (run / POINTER).unlink(missing_ok=True)


def newest_copy(run: Path) -> Path | None:
    """Return the newest copy whose checksums are right."""
    folder = find_copies(run)
    if folder is None:
        return None
    store = CheckpointStore(folder)
    damaged = store.damaged()
    whole = [store.path(step) for step in store.steps() if store.path(step) not in damaged]
    return whole[-1] if whole else None


class MemorySaver(Saver):
    """Writes copies every `freq` steps; one that cannot be written ends the copies, not the run."""

    def __init__(self, run: Path, freq: int, free_memory: Callable[[], int], ended: Ended) -> None:
        """Open or make the folder of copies. Below 1, `freq` writes none, and `remove` removes earlier ones."""
        self._run, self._freq, self._free_memory = run, freq, free_memory
        folder = find_copies(run)
        if folder is None and freq > 0:
            try:
                folder = make_copies(run)
            except OSError as error:
                log.warning("copies in memory are off: %s", error)
        self._freq = freq if folder is not None else 0
        super().__init__(CheckpointStore(folder or run, limit=KEPT), ended)

    @property
    def max_bytes(self) -> int:
        """The most that a copy may take."""
        return self._free_memory() // SHARE

    def saves(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    def finish(self, *, last: bool = False) -> None:
        try:
            super().finish(last=last)
        except CheckpointError as error:
            self._freq = 0
            log.warning("copies in memory are off: %s", error)
        except Exception:  # of groups that are being sampled; the step that needs them raises it
            log.debug("no copy in memory", exc_info=True)

    def close(self) -> None:
        """End the thread, and say which copies a run that failed leaves."""
        self.finish_or_warn()
        super().close()
        if (copy := self._store.latest() if find_copies(self._run) else None) is not None:
            log.warning("%s stays in memory: the same command resumes from it. Delete its folder if none will", copy)

    def remove(self) -> None:
        """Remove all copies, as the run's last state is on disk."""
        self.finish()
        remove_copies(self._run)
