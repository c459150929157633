"""Locks of folders that several processes may write to."""

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from r1_cli.config import ConfigError, Problem

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"  # in the folder of a run
FOLDER_KEY, ADVICE = "trainer.save_checkpoint_path", "Wait for it, or set trainer.experiment_name"
RUN = "another run"


@contextmanager
def lock_folder(
    root: Path, name: str = LOCK_FILE, *, key: str = FOLDER_KEY, advice: str = ADVICE, by: str = RUN
) -> Iterator[None]:
    """Lock a run's folder inside the block.

    The operating system releases the lock of a killed process. A network disk without locks causes a warning.

    Args:
        name: the file that is locked.
        key, advice: the setting that the error names, and what to do.
        by: what the error calls the other process.

    Raises:
        ConfigError: another run has the folder; names its process and machine.
    """
    path, file = root / name, None
    while file is None or not _is_at(path, file):  # removed by a run that ended meanwhile
        root.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        _lock(file, root, key, advice, by=by)
    os.register_at_fork(after_in_child=file.close)  # a forked process that outlives this one must not keep the lock
    with file:
        file.truncate(0)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(f"process {os.getpid()} on {platform.node()}, which began at {began}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if root.is_dir() and not any(root.iterdir()):  # refused before it wrote anything
                root.rmdir()


def require_free(root: Path, name: str = LOCK_FILE, *, key: str = FOLDER_KEY, advice: str = ADVICE) -> None:
    """Raise ConfigError if a run is using this folder. Arguments as of `lock_folder`."""
    path = root / name
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            _lock(file, root, key, advice, fcntl.LOCK_SH)


def find_holder(root: Path, name: str = LOCK_FILE) -> str | None:
    """Return which process has locked a folder, as its file says; None if none has.

    On a network disk without locks, a process that was killed seems to have it still.
    """
    path = root / name
    with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read_holder(file)
    return None


def _read_holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "an unknown process"


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether an open file still has this name; a network disk may count a removed file's link."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _lock(file: IO[str], root: Path, key: str, advice: str, kind: int = fcntl.LOCK_EX, by: str = RUN) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"is in use by {by}: {_read_holder(file)}. {advice}"
        raise ConfigError([Problem(key, message, str(root))]) from error
    except OSError as error:
        log.warning("%s cannot be locked (%s): start no second run in it", root, error)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for this folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
