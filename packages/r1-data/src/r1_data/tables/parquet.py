"""Parquet files of any size as rows: a row group is decoded once, when one of its rows is first requested.

Decoded rows go to an unnamed, memory-mapped file in `TMPDIR`: rows can be read in any order, and the system caches what
fits in memory. A small file stays in memory.
"""

import errno
import logging
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from r1_data.tables.table import BatchedReader, as_dicts
from r1_data.types import DataError, Row

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

log = logging.getLogger("r1_data")

_SMALL = 2**26  # decoded bytes of a file that stay in memory
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
_BATCH = 2**24  # approximate bytes of rows decoded at a time
_MOST_ROWS = 4096  # rows decoded at a time


class ParquetTable:
    def __init__(self, path: Path) -> None:
        """Read the footer. Raises DataError: not a parquet file, or two columns of the same name."""
        self.path = path
        self._file = _open(path)
        metadata = self._file.metadata
        names = self._file.schema_arrow.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path}: two columns are called {twice!r}; rename or delete one")
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        if (least := min((group.num_rows for group in groups), default=0)) < 0:
            raise DataError(f"{path}: its header says that a row group has {least} rows: write it again")
        self._ends = list(accumulate(group.num_rows for group in groups))
        self._sizes = [group.total_byte_size for group in groups]
        self._groups: dict[int, _Batches | DataError] = {}
        self._lock, self._held = threading.Lock(), 0  # decoded bytes in memory

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[int, Row]:
        """Raises DataError for a row that is too long or no text, or of a row group that cannot be decoded."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        with self._lock:
            if which not in self._groups:
                self._groups[which] = self._decode(which)
            batches = self._groups[which]
        if isinstance(batches, DataError):
            raise DataError(f"{self.path}:{index + 1}: {batches}") from batches
        try:
            return index + 1, batches.rows[index - (self._ends[which - 1] if which else 0)]
        except DataError as error:
            raise type(error)(f"{self.path}:{index + 1}: {error}") from error

    def __reduce__(self) -> tuple[object, ...]:
        return ParquetTable, (self.path,)

    def _decode(self, which: int) -> "_Batches | DataError":
        import pyarrow

        rows = self._ends[which] - (self._ends[which - 1] if which else 0)
        batch_rows = max(1, min(_MOST_ROWS, rows * _BATCH // max(1, self._sizes[which])))

        def batches() -> Iterator["pyarrow.RecordBatch"]:
            return iter(self._file.iter_batches(batch_size=batch_rows, row_groups=[which]))

        try:
            found = _Batches(self._kept(batches))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            return DataError(f"its row group {which + 1} of {len(self._ends)} cannot be read ({error})")
        if len(found) != rows:
            return DataError(f"its row group {which + 1} has {len(found)} rows, and the file's header says {rows}")
        return found

    def _kept(self, batches: Callable[[], Iterator["pyarrow.RecordBatch"]]) -> list["pyarrow.RecordBatch"]:
        held, size = [], self._held
        for batch in batches():
            held.append(batch)
            size += batch.nbytes
            if size > _SMALL:
                break
        else:
            self._held = size
            return held
        del held, batch
        try:
            return _mapped(self._file.schema_arrow, batches())
        except _NoRoom as error:
            log.warning("%s: decoded rows stay in memory, %s (set TMPDIR)", self.path, error)
            return list(batches())


class _Batches:
    def __init__(self, batches: Iterable["pyarrow.RecordBatch"]) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self.rows = BatchedReader(self._read)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _read(self, start: int, most: int) -> list[Row]:
        which = bisect_right(self._ends, start)
        before = self._ends[which - 1] if which else 0
        return as_dicts(self._batches[which].slice(start - before, most))


class _NoRoom(Exception): ...


def _mapped(schema: "pyarrow.Schema", batches: Iterable["pyarrow.RecordBatch"]) -> list["pyarrow.RecordBatch"]:
    import mmap

    import pyarrow

    try:
        with tempfile.TemporaryFile() as file:
            with pyarrow.ipc.new_file(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _NoRoom(f"{tempfile.gettempdir()} has no room for it ({error})") from error
    reader = pyarrow.ipc.open_file(pyarrow.py_buffer(content))
    return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _open(path: Path) -> "pyarrow.parquet.ParquetFile":
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a parquet file ({error})") from error
