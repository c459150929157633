"""Media that were decoded and resized before: in memory and, if a folder is given, on disk, both bounded in bytes.

The key is a hash of the encoded content and of everything that decides the resized pixels, so the same picture in two
rows or two runs is decoded once. What is kept are 8-bit pixels, an eighth of the model's inputs.
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

_FULL, _SWEPT = 0.9, 0.8  # of the bound on disk: where a folder counts as full, and what it is emptied down to
_LOOK = 0.01  # of the bound: what a process writes before it looks at what the others have written


class MediaCache:
    """Arrays by key, the least recently used leaving first."""

    def __init__(self, max_bytes: int, folder: str | Path | None = None, max_disk_bytes: int = 0) -> None:
        """`folder` is made if need be, and shared by all processes that name it: the bound on disk is that of all."""
        self.bytes = 0  # in memory
        self._max_bytes, self._max_disk_bytes = max_bytes, max_disk_bytes
        self._arrays: OrderedDict[str, ndarray] = OrderedDict()
        self._folder = Path(folder) if folder and max_disk_bytes else None
        self._unseen = 0  # bytes written since the folder was looked at
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._sweep()
            except OSError as error:
                log.warning("%s cannot be used (%s): resized media are not kept on disk", self._folder, error)
                self._folder = None

    def get(self, key: str) -> "ndarray | None":
        """The array of a key, or None where it is not kept any more."""
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
        except (OSError, ValueError, EOFError, SyntaxError, MemoryError):  # not there, cut off, or written over
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read is of use, too
            os.utime(path)
        self._remember(key, array)
        return array

    def put(self, key: str, array: "ndarray") -> None:
        """Keep an array. One that is larger than the whole cache is not kept."""
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
        """Write beside and rename, so that another process never reads half a file; a full disk is no error."""
        import numpy

        beside = path.with_suffix(f".{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # on another machine there may be no folder yet
            with beside.open("wb") as file:
                numpy.save(file, array, allow_pickle=False)
            self._unseen += beside.stat().st_size
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Delete the files used longest ago, if the folder is full."""
        assert self._folder is not None
        files = []
        for path in self._folder.glob("??/*.npy"):
            try:
                status = path.stat()
            except OSError:  # another process sweeps, too
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
