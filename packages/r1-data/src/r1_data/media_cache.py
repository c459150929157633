"""Cache decoded and resized media, in memory and optionally on disk, both bounded in bytes.

The key is a hash of the encoded content and of everything that determines the resized pixels, so a picture in two rows
or runs is decoded once. Stores 8-bit pixels, an eighth of the model's inputs.
"""

import contextlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

log = logging.getLogger("r1_data")

_FULL, _SWEPT = 0.9, 0.8  # of the bound on disk: sweep above the first, down to the second
_LOOK = 0.01  # of the bound: bytes written between two looks at the folder


class MediaCache:
    """A least-recently-used cache of arrays by key."""

    def __init__(self, max_bytes: int, folder: str | Path | None = None, max_disk_bytes: int = 0) -> None:
        """`folder` is created if missing and shared by all processes that name it, as is its bound on disk."""
        self.bytes = 0  # in memory
        self._max_bytes, self._max_disk_bytes = max_bytes, max_disk_bytes
        self._arrays: OrderedDict[str, ndarray] = OrderedDict()
        self._folder = Path(folder) if folder and max_disk_bytes else None
        self._unseen = 0  # bytes written since the last look at the folder
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
            except OSError as error:
                log.warning("%s cannot be used (%s): resized media are not kept on disk", self._folder, error)
                self._folder = None

    def get(self, key: str) -> "ndarray | None":
        import numpy

        array = self._arrays.get(key)
        if array is not None:
            self._arrays.move_to_end(key)
            return array
        if self._folder is None:
            return None
        path = self._path(key)
        try:
            array = numpy.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError, SyntaxError, MemoryError):  # missing, truncated or overwritten
            return None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(path)
        self._remember(key, array)
        return array

    def put(self, key: str, array: "ndarray") -> None:
        """Cache an array, unless it is larger than the whole cache."""
        self._remember(key, array)
        if self._folder is not None and array.nbytes <= self._max_disk_bytes:
            self._write(self._path(key), array)
            if self._unseen > _LOOK * self._max_disk_bytes:
                self._sweep()

    def _remember(self, key: str, array: "ndarray") -> None:
        if array.nbytes > self._max_bytes or key in self._arrays:
            return
        self._arrays[key] = array
        self.bytes += array.nbytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._arrays.popitem(last=False)[1].nbytes

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.npy"

    def _write(self, path: Path, array: "ndarray") -> None:
        import numpy

        beside = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # it may not exist on this machine
            with beside.open("wb") as file:
                numpy.save(file, array, allow_pickle=False)
            self._unseen += beside.stat().st_size
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _sweep(self) -> None:
        assert self._folder is not None
        files = []
        for path in self._folder.glob("??/*.npy"):
            try:
                status = path.stat()
            except OSError:  # swept by another process
                continue
            files.append((status.st_mtime, status.st_size, path))
        self._unseen, on_disk = 0, sum(size for _, size, _ in files)
        if on_disk <= _FULL * self._max_disk_bytes:
            return
        for _, size, path in sorted(files):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            on_disk -= size
            if on_disk <= _SWEPT * self._max_disk_bytes:
                break
