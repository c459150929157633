"""Single rows of what gives many at once for little more: a reader that goes on from row to row gets them in runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from r1_data.types import Overlong

BLOCK = 2**22  # bytes of a run, about
_MOST = 256  # rows of it
MAX_ROW_BYTES = 2**28  # of one row as it is stored, media included; a longer one is never held in memory


class Table(Protocol):
    """The rows of one file; `table[i]` (i from 0) is (row number, row)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Some rows of a table, which keep their numbers."""

    table: Table
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return self.table[self.rows[index]]


@dataclass(frozen=True, slots=True)
class ListTable:
    """Rows that are mappings in memory."""

    rows: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return index + 1, dict(self.rows[index])


class Runs:
    """Items by number. One that is asked for out of order comes alone, one that follows brings those behind it."""

    def __init__(self, fetch: Callable[[int, int], Sequence[Any]]) -> None:
        """`fetch(start, most)` gives one item or more from `start` on, and at most `most`."""
        self._fetch = fetch
        self._run: tuple[int, Sequence[Any]] = (-1, ())  # where the latest run began, and the run

    def __getitem__(self, index: int) -> Any:
        start, run = self._run
        if not start <= index < start + len(run):
            most = _MOST if index == start + len(run) else 1
            start, run = self._run = index, self._fetch(index, most)
        return run[index - start]

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, (self._fetch,)


def as_dicts(table: Any) -> list[dict[str, Any]]:
    """The first rows of an Arrow table or batch, as many as are few bytes together, as Python objects.

    Raises Overlong if already the first row has more than MAX_ROW_BYTES.
    """
    run = table.slice(0, max(1, table.num_rows * BLOCK // max(1, table.nbytes)))
    if run.nbytes > MAX_ROW_BYTES:
        run = table.slice(0, 1)
        require_row_bytes(run.nbytes)
    rows: list[dict[str, Any]] = run.to_pylist()
    return rows


def require_row_bytes(size: int) -> None:
    """Raise Overlong for a row of more than MAX_ROW_BYTES."""
    if size > MAX_ROW_BYTES:
        raise Overlong(f"the row has more than {MAX_ROW_BYTES:,} bytes")
