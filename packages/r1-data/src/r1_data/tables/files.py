"""Local files as rows: json, JSON lines, csv and parquet, each row with the number a person would count.

Rows are numbered from 1. In JSON lines the number is the line, in csv it counts the rows below the header. Text files
may be packed (`.jsonl.gz`, `.csv.zst`).
"""

import csv
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from r1_data.tables.arrow import SavedTable
from r1_data.tables.table import BLOCK, MAX_ROW_BYTES, Runs, Table, require_row_bytes
from r1_data.types import DataError, Overlong

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> kind
PACKED = {".gz": "gzip", ".zst": "zstd"}  # suffix of a packed text file -> how

_BOM = b"\xef\xbb\xbf"
_NO_TEXT = {  # first bytes -> what a file is that is no UTF-8 text, and what to do
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "packed by gzip; let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd; let its name end in .zst",
    b"PAR1": "a parquet file; let its name end in .parquet",
}


def kind_of(path: Path) -> str | None:
    """The kind of file that a name tells; None where it is none that is read."""
    suffix = path.suffix.lower()
    kind = KINDS.get(Path(path.stem).suffix.lower() if suffix in PACKED else suffix)
    return None if suffix in PACKED and kind == "parquet" else kind


def open_table(path: Path, kind: str) -> Table:
    """Open a file of `kind`: a value of `KINDS`, or "arrow", the folder of a saved data set.

    Raises DataError that names the file, and the line where it can.
    """
    if kind == "parquet":
        from r1_data.tables.parquet import ParquetTable

        return ParquetTable(path)
    if kind == "arrow":
        return SavedTable(path)
    text = TextFile(path)
    if kind == "csv":
        return CsvTable(text)
    return JsonLinesFile(text) if _holds_lines(text) else JsonArrayFile(text)


def count_table(path: Path, kind: str) -> int:
    """The number of rows of a file, reading as little of it as the kind allows (a parquet file: its footer)."""
    return len(open_table(path, kind))


class TextFile:
    """The bytes of a UTF-8 file, read when asked for, and the same as when it was opened."""

    def __init__(self, path: Path) -> None:
        """Raises DataError: it cannot be read, or is no UTF-8 text by its first bytes."""
        self.path = path
        try:
            self._unpacked = _unpack(path) if path.suffix.lower() in PACKED else None
            with self.open() as file:
                self._stamp, head = _stamp(os.fstat(file.fileno())), file.read(4)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error})") from error
        for start, what in _NO_TEXT.items():
            if head.startswith(start):
                raise DataError(f"{path}: not UTF-8 text but {what}")

    def open(self) -> BinaryIO:
        """The file from its beginning."""
        if self._unpacked is None:
            return self.path.open("rb")
        copy = open(os.dup(self._unpacked.fileno()), "rb")  # noqa: SIM115
        copy.seek(0)
        return copy

    def read(self, offset: int, length: int) -> bytes:
        """Raises DataError if the file is not what it was."""
        if self._unpacked is not None:
            return os.pread(self._unpacked.fileno(), length, offset)
        try:
            with self.path.open("rb", buffering=0) as file:
                self._require_same(os.fstat(file.fileno()))
                return os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more ({error})") from error

    def check(self) -> None:
        """Raise DataError if the file is not what it was."""
        if self._unpacked is None:
            try:
                self._require_same(os.stat(self.path))
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read any more ({error})") from error

    def _require_same(self, status: os.stat_result) -> None:
        if _stamp(status) != self._stamp:
            raise DataError(f"{self.path}: the file was changed after it was opened; start again")

    def __reduce__(self) -> tuple[Any, ...]:
        return TextFile, (self.path,)


class JsonLinesFile:
    """One JSON object a line, read from disk when asked for; only the lines' offsets are kept."""

    def __init__(self, text: TextFile) -> None:
        self._text, self.path = text, text.path
        self._lines = Runs(self._read)
        self._numbers, self._offsets, self._lengths = array("Q"), array("Q"), array("Q")  # of lines that are not blank
        offset = 0
        with text.open() as file:
            for number, (length, blank) in enumerate(_line_lengths(file), start=1):
                if not blank:
                    self._numbers.append(number)
                    self._offsets.append(offset)
                    self._lengths.append(length)
                offset += length

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        number = self._numbers[index]
        self._text.check()
        try:
            require_row_bytes(self._lengths[index])
        except Overlong as error:
            raise Overlong(f"{self.path}:{number}: {error}") from error
        line = self._lines[index].removeprefix(_BOM)
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            why = "nested too deep" if isinstance(error, RecursionError) else error
            raise DataError(f"{self.path}:{number}: not a JSON row ({why}); mend or delete this line") from error
        return number, _require_mapping(row, self.path, number)

    def _read(self, start: int, most: int) -> list[bytes]:
        """The lines from `start` on, as many as are few bytes together."""
        first = self._offsets[start]
        stop = min(start + most, len(self))
        while stop > start + 1 and self._offsets[stop - 1] + self._lengths[stop - 1] - first > BLOCK:
            stop = (start + stop) // 2
        data = self._text.read(first, self._offsets[stop - 1] + self._lengths[stop - 1] - first)
        places = zip(self._offsets[start:stop], self._lengths[start:stop], strict=True)
        return [data[offset - first : offset - first + length] for offset, length in places]


class JsonArrayFile:
    """A json file that is one list of objects."""

    def __init__(self, text: TextFile) -> None:
        self.path = path = text.path
        with text.open() as file:
            content = file.read().removeprefix(_BOM)
        try:
            rows = _parse(content)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: broken JSON ({error.msg}, column {error.colno})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: broken JSON ({error})") from error
        if not isinstance(rows, list):
            raise DataError(f"{path}: the JSON holds one {type(rows).__name__}, not a list of rows (or one row a line)")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        return index + 1, _require_mapping(self._rows[index], self.path, index + 1)


class CsvTable:
    """A csv file with a header; every value stays the text it is, so an answer "007" is not turned into 7."""

    def __init__(self, text: TextFile) -> None:
        self.path = path = text.path
        before = csv.field_size_limit(sys.maxsize)
        try:
            with text.open() as file:
                lines = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(file))
                reader = csv.reader(lines, strict=True)
                self._header = next(reader, [])
                self._rows = [row for row in reader if row]
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error})") from error
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: broken csv ({error})") from error
        finally:
            csv.field_size_limit(before)
        if len(set(self._header)) < len(self._header):
            twice = next(name for name in self._header if self._header.count(name) > 1)
            raise DataError(f"{path}: two columns are called {twice!r}; rename or delete one")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[int, dict[str, Any]]:
        cells, wanted = self._rows[index], len(self._header)
        if len(cells) != wanted:
            raise DataError(f"{self.path}:{index + 1}: the row has {len(cells)} fields but the header has {wanted}")
        return index + 1, dict(zip(self._header, cells, strict=True))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _unpack(path: Path) -> BinaryIO:
    """The content of a packed file, in a file without a name that ends with this process."""
    import pyarrow

    unpacked: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    by_lines, length = _is_jsonl(path), 0  # bytes of the line that is being written
    try:
        with pyarrow.input_stream(str(path), compression=PACKED[path.suffix.lower()]) as stream:
            while block := stream.read(BLOCK):
                end = block.rfind(b"\n")
                if by_lines and length > MAX_ROW_BYTES and end < 0:
                    continue  # the line is refused by its length already: a small file can hold one of terabytes
                length = length + len(block) if end < 0 else len(block) - end - 1
                unpacked.write(block)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be unpacked, it may be cut off or no {path.suffix} file ({error})") from error
    unpacked.flush()
    return unpacked


def _parse(data: bytes) -> Any:
    """JSON as Python objects. Raises ValueError: broken, not UTF-8, a key twice, text that is no text."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from error
    value = json.loads(text, object_pairs_hook=_once)
    if b"\\ud" in data or b"\\uD" in data:  # only so can half a surrogate pair be written
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a surrogate pair, which is no text: {error.reason}") from error
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _holds_lines(text: TextFile) -> bool:
    """Whether a json file is a row a line: always for .jsonl, and for .json unless it opens with a bracket."""
    if _is_jsonl(text.path):
        return True
    with text.open() as file:
        lines = _full_lines(file)
        first, second = next(lines, b""), next(lines, None)
    if not first.startswith(b"{"):
        return False
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return first.endswith(b"}")  # a broken row; else the first line of one object spread over several
    columns = second is None and bool(row) and all(isinstance(cell, list) for cell in row.values())
    return not columns  # a file of one object whose cells are all lists is a table by columns


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in [suffix.lower() for suffix in path.suffixes[-2:]]


def _line_lengths(file: BinaryIO) -> Iterator[tuple[int, bool]]:
    """Yield the length of each line in bytes and whether it is blank; of a long line only BLOCK bytes are in memory."""
    length, blank = 0, True
    while piece := file.readline(BLOCK):
        length, blank = length + len(piece), blank and not piece.strip()
        if piece.endswith(b"\n"):
            yield length, blank
            length, blank = 0, True
    if length:
        yield length, blank


def _full_lines(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in (line.removeprefix(_BOM).strip() for line in file) if line)


def _require_mapping(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: a row must be an object with named columns, found {type(row).__name__}")
    return row
