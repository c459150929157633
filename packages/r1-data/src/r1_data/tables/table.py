"""Tables of rows by number, and random access over a batched reader."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, overload

from r1_data.types import DataError, Overlong, Row

if TYPE_CHECKING:
    import pyarrow

Item = TypeVar("Item")

BLOCK = 2**22  # approximate bytes read ahead
_MOST = 256  # rows read ahead
MAX_ROW_BYTES = 2**28  # of one stored row, media included; a larger one is never in memory


class Table(Protocol):
    """The rows of one file; `table[i]` (i from 0) is (row number, row)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[int, Row]: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows of a table, with their original numbers."""

    table: Table
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        return self.table[self.rows[index]]


@dataclass(frozen=True, slots=True)
class ListTable:
    rows: Sequence[Mapping[str, object]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        return index + 1, dict(self.rows[index])


class Rows(Sequence[tuple[str, Row]]):
    """All rows of a source, in order: `rows[i]` is (row id, row), the row id being "label:row number"."""

    def __init__(self, tables: Sequence[tuple[str, Table]]) -> None:
        self._tables = list(tables)
        self._ends = list(accumulate(len(table) for _, table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> tuple[str, Row]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[str, Row]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, Row] | list[tuple[str, Row]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect_right(self._ends, position)
        label, table = self._tables[which]
        number, row = table[position - self._ends[which] + len(table)]
        return f"{label}:{number}", row

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        return (self[index] for index in range(len(self)))


class BatchedReader(Generic[Item]):
    """Items by number from a batched reader: sequential access reads ahead, random access reads one."""

    def __init__(self, fetch: Callable[[int, int], Sequence[Item]]) -> None:
        """`fetch(start, most)` returns one to `most` items from `start` on."""
        self._fetch = fetch
        self._batch: tuple[int, Sequence[Item]] = (-1, ())  # the latest batch: its first index, its items

    def __getitem__(self, index: int) -> Item:
        start, batch = self._batch
        if not start <= index < start + len(batch):
            most = _MOST if index == start + len(batch) else 1
            start, batch = self._batch = index, self._fetch(index, most)
        return batch[index - start]

    def __reduce__(self) -> tuple[object, ...]:
        return BatchedReader, (self._fetch,)


def as_dicts(table: "pyarrow.Table | pyarrow.RecordBatch") -> list[Row]:
    """Return the first rows of an Arrow table or batch as Python objects, as many as fit a block.

    Raises Overlong if the first row alone exceeds MAX_ROW_BYTES, DataError if a text of it is not UTF-8.
    """
    batch = table.slice(0, max(1, table.num_rows * BLOCK // max(1, table.nbytes)))
    if batch.nbytes > MAX_ROW_BYTES:
        batch = table.slice(0, 1)
        require_row_bytes(batch.nbytes)
    try:
        rows: list[Row] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            return as_dicts(batch.slice(0, 1))
        raise DataError(f"a text of the row is not UTF-8 ({error})") from error
    return rows


def require_row_bytes(size: int) -> None:
    if size > MAX_ROW_BYTES:
        raise Overlong(f"the row has more than {MAX_ROW_BYTES:,} bytes")
