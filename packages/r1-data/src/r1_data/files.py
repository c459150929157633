"""Local files as rows: json, JSON lines, csv and parquet, each row with the number a person would count.

Rows are numbered from 1. In JSON lines the number is the line, in csv it counts the rows below the header.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from r1_data.types import DataError

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> kind

_BOM = b"\xef\xbb\xbf"


class Table(Protocol):
    """The rows of one file; `table[i]` (i from 0) is (row number, row)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]: ...


def open_table(path: Path, kind: str) -> Table:
    """Open a file of `kind` (a value of `KINDS`). Raises DataError that names the file, and the line where it can."""
    if kind == "parquet":
        return ParquetTable(path)
    if kind == "csv":
        return CsvTable(path)
    return JsonLinesFile(path) if _holds_lines(path) else JsonArrayFile(path)


def count_table(path: Path, kind: str) -> int:
    """The number of rows of a file, reading as little of it as the kind allows (a parquet file: its footer)."""
    if kind == "parquet":
        return int(_open_parquet(path).metadata.num_rows)
    return len(open_table(path, kind))


class JsonLinesFile:
    """One JSON object a line, read from disk when asked for; only the lines' offsets are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[tuple[int, int]] = []  # (line number, byte offset) of each line that is not blank
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._lines.append((number, offset))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        number, offset = self._lines[index]
        with self.path.open("rb") as file:
            file.seek(offset)
            line = file.readline().removeprefix(_BOM)
        try:
            row = json.loads(line)
        except ValueError as error:  # broken JSON, or bytes that are not UTF-8
            raise DataError(f"{self.path}:{number}: not a JSON row ({error}); mend or delete this line") from error
        return number, _require_mapping(row, self.path, number)


class JsonArrayFile:
    """A json file that is one list of objects."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            rows = json.loads(path.read_bytes().removeprefix(_BOM))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: broken JSON ({error.msg}, column {error.colno})") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error})") from error
        if not isinstance(rows, list):
            raise DataError(f"{path}: holds one {type(rows).__name__}, not a list of rows (or one row a line)")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return index + 1, _require_mapping(self._rows[index], self.path, index + 1)


class CsvTable:
    """A csv file with a header; every value stays the text it is, so an answer "007" is not turned into 7."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                self._rows = list(_read_csv(file, path))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error})") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return index + 1, self._rows[index]


class ParquetTable:
    """A parquet file, held in Arrow's columns; a row becomes Python objects only when asked for."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.path = path
        try:
            self._table = _open_parquet(path).read()
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: the parquet file cannot be read ({error})") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return index + 1, self._table.slice(index, 1).to_pylist()[0]


def _open_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file ({error})") from error


def _read_csv(file: Any, path: Path) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(file, strict=True)
    try:
        for number, row in enumerate(reader, start=1):
            wanted = len(reader.fieldnames or ())
            if None in row:
                extra: Any = row[None]
                raise DataError(f"{path}: row {number} has {wanted + len(extra)} fields but the header has {wanted}")
            if None in row.values():
                found = sum(value is not None for value in row.values())
                raise DataError(f"{path}: row {number} has {found} fields but the header has {wanted}")
            yield dict(row)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: broken csv ({error})") from error


def _holds_lines(path: Path) -> bool:
    """Whether a json file is a row a line: always for .jsonl, and for .json unless it opens with a bracket."""
    if path.suffix.lower() == ".jsonl":
        return True
    with path.open("rb") as file:
        first = next((line for line in file if line.removeprefix(_BOM).strip()), b"").removeprefix(_BOM).strip()
    if not first.startswith(b"{"):
        return False
    try:
        json.loads(first)
    except ValueError:
        return first.endswith(b"}")  # a broken row; else the first line of one object spread over several
    return True


def _require_mapping(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: a row must be an object with named columns, found {type(row).__name__}")
    return row
