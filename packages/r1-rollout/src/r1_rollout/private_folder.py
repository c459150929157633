"""Private temporary folders that no process leaves behind, even if it is killed."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LOCK = ".lock"
_YOUNG = 60.0  # seconds; a new folder may be without its lock for a moment
_ENDING = 30.0  # seconds in which a process that still writes into a folder may end


class PrivateFolder:
    """A folder of mode 0700, held by a lock that ends with this process.

    A new one removes those with its prefix that dead processes of this user left.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        place = Path(parent or tempfile.gettempdir())
        _remove_abandoned(place, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        deadline = time.monotonic() + _ENDING
        shutil.rmtree(self.path, ignore_errors=True)
        while self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _remove_abandoned(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, still in use, or just being removed
            state = folder.lstat()
            if state.st_uid == os.getuid() and time.time() - state.st_mtime > _YOUNG and not folder.is_symlink():
                lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)
