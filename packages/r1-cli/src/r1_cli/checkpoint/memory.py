"""Copies of a run's state in memory, on the machine's RAM disk: they outlive the run's processes, not the machine."""

import logging
import os
import shutil
import stat
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore, Store
from r1_cli.checkpoint.saving import Ended, Saver

RAM_DISK = Path("/dev/shm")
PREFIX = "r1-copies-"
POINTER = "memory_copies.txt"  # in the run's folder: where its copies are, a folder on each line
OWNER = "run.txt"  # among the copies: the run's folder
KEPT = 2  # copies, beside the one that is being written
SHARE = 3  # of free memory: a copy may take one part, its files another

log = logging.getLogger("r1")


def find_copies(run: Path) -> Path | None:
    """Return the folder with a run's copies on this machine, if this user made it for this run."""
    return next(iter(all_copies(run)), None)


def all_copies(run: Path) -> list[Path]:
    """As `find_copies`, for several nodes on one machine."""
    try:
        named = [Path(line) for line in (run / POINTER).read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    return [folder for folder in named if _owner(folder) == run.resolve()]


def _owner(folder: Path) -> Path | None:
    """Return the run of a folder of copies; None if it is another user's, or open to others."""
    try:
        state = folder.lstat()
        private = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077
        return Path((folder / OWNER).read_text(encoding="utf-8")) if private else None
    except OSError:
        return None


def make_folder(name: str = "") -> Path:
    """Make a private folder that `claim_folder` gives to a run, and remove those of no run. Raises OSError."""
    for folder in RAM_DISK.glob(f"{PREFIX}*"):  # of runs whose folders are gone
        if (owner := _owner(folder)) is not None and folder not in all_copies(owner):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}", dir=RAM_DISK))


def claim_folder(folder: Path, run: Path) -> None:
    """Make `folder` one of the run's, which names it by now."""
    (folder / OWNER).write_text(str(run.resolve()), encoding="utf-8")


def name_folders(run: Path, folders: Sequence[Path]) -> None:
    """Write into the run's folder where its copies are."""
    (run / POINTER).write_text("".join(f"{folder}\n" for folder in folders), encoding="utf-8")


def make_copies(run: Path) -> Path:
    """Make a private folder for a run's copies. Raises OSError."""
    folder = make_folder()
    name_folders(run, [folder])
    claim_folder(folder, run)
    return folder


def remove_copies(run: Path) -> None:
    for folder in all_copies(run):
        shutil.rmtree(folder, ignore_errors=True)


def forget_copies(run: Path) -> None:
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


class Copies(Store):
    """Where the copies of a run are: on one machine (`MachineCopies`), or on the nodes of a cluster."""

    @abstractmethod
    def open(self) -> None:
        """Make folders for copies. Raises OSError or CheckpointError."""

    @abstractmethod
    def free_memory(self) -> int:
        """Return the free bytes of the machine with the fewest."""

    @abstractmethod
    def folder_on_ranks(self, folder: Path) -> Path:
        """Return where the processes that write a model's files have that folder of a copy."""

    @abstractmethod
    def remove(self) -> None:
        """Remove all copies. Raises CheckpointError."""


class MachineCopies(CheckpointStore, Copies):
    def __init__(self, run: Path, free: Callable[[], int]) -> None:
        super().__init__(find_copies(run) or run, limit=KEPT)
        self._run, self._free = run, free

    def open(self) -> None:
        self.root = find_copies(self._run) or make_copies(self._run)

    def latest(self) -> Path | None:
        return super().latest() if find_copies(self._run) else None

    def free_memory(self) -> int:
        return self._free()

    def folder_on_ranks(self, folder: Path) -> Path:
        return folder

    def remove(self) -> None:
        remove_copies(self._run)
        forget_copies(self._run)


class MemorySaver(Saver):
    """Writes copies every `freq` steps; one that cannot be written ends the copies, not the run."""

    def __init__(self, copies: Copies, freq: int, ended: Ended) -> None:
        """Open the copies. Below 1, `freq` writes none, and `remove` removes earlier ones."""
        self._copies, self._freq = copies, freq
        if freq > 0:
            try:
                copies.open()
            except (OSError, CheckpointError) as error:
                self._freq = 0
                log.warning("copies in memory are off: %s", error)
        super().__init__(copies, ended)

    @property
    def max_bytes(self) -> int:
        """The most that a copy may take."""
        return self._copies.free_memory() // SHARE

    def folder_on_ranks(self, folder: Path) -> Path:
        return self._copies.folder_on_ranks(folder)

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
        if (copy := self._copies.latest()) is not None:
            log.warning("%s stays in memory: the same command resumes from it. Delete its folder if none will", copy)

    def remove(self) -> None:
        """Remove all copies, as the run's last state is on disk."""
        self.finish()
        try:
            self._copies.remove()
        except CheckpointError as error:
            log.warning("copies stay in memory until the next run with copies removes them: %s", error)
