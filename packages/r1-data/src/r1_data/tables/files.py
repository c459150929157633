"""Local files as rows: json, JSON lines, csv and parquet, with the row number that a person would count.

Rows are numbered from 1: in JSON lines by line, in csv by row below the header. Text files may be compressed
(`.jsonl.gz`, `.csv.zst`).
"""

import csv
import json
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from r1_data.tables.arrow import SavedTable
from r1_data.tables.table import BLOCK, MAX_ROW_BYTES, BatchedReader, Table, require_row_bytes
from r1_data.types import DataError, Overlong, Row

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> kind
PACKED = {".gz": "gzip", ".zst": "zstd"}  # suffix of a compressed text file -> codec

_BOM = b"\xef\xbb\xbf"
_NO_TEXT = {  # first bytes -> what the file is instead of UTF-8 text, and what to do
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "packed by gzip; let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd; let its name end in .zst",
    b"PAR1": "a parquet file; let its name end in .parquet",
}


def kind_of(path: Path) -> str | None:
    """Return the kind of a file from its name, None if it is not supported."""
    suffix = path.suffix.lower()
    kind = KINDS.get(Path(path.stem).suffix.lower() if suffix in PACKED else suffix)
    return None if suffix in PACKED and kind == "parquet" else kind


def open_table(path: Path, kind: str) -> Table:
    """Open a file of `kind`: a value of `KINDS`, or "arrow", the folder of a saved data set.

    Raises DataError with the file, and the line if known.
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
    return len(open_table(path, kind))


class TextFile:
    """A UTF-8 file, read on request, and guaranteed unchanged since it was opened."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if it cannot be read, or its first bytes are not UTF-8 text."""
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
        if self._unpacked is None:
            return self.path.open("rb")
        copy = open(os.dup(self._unpacked.fileno()), "rb")  # noqa: SIM115
        copy.seek(0)
        return copy

    def read(self, offset: int, length: int) -> bytes:
        """Raises DataError if the file has changed."""
        if self._unpacked is not None:
            return os.pread(self._unpacked.fileno(), length, offset)
        try:
            with self.path.open("rb", buffering=0) as file:
                self._require_same(os.fstat(file.fileno()))
                return os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more ({error})") from error

    def check(self) -> None:
        if self._unpacked is None:
            try:
                self._require_same(os.stat(self.path))
            except OSError as error:
                raise DataError(f"{self.path}: cannot be read any more ({error})") from error

    def _require_same(self, status: os.stat_result) -> None:
        if _stamp(status) != self._stamp:
            raise DataError(f"{self.path}: the file was changed after it was opened; start again")

    def __reduce__(self) -> tuple[object, ...]:
        return TextFile, (self.path,)


class JsonLinesFile:
    """One JSON object per line, read on request; only offsets are in memory."""

    def __init__(self, text: TextFile) -> None:
        self._text, self.path = text, text.path
        self._lines = BatchedReader(self._read)
        self._numbers, self._offsets, self._lengths = array("Q"), array("Q"), array("Q")  # of nonblank lines
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

    def __getitem__(self, index: int) -> tuple[int, Row]:
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
            raise DataError(f"{self.path}:{number}: not a JSON row ({why}); fix or delete this line") from error
        return number, _require_mapping(row, self.path, number)

    def _read(self, start: int, most: int) -> list[bytes]:
        first = self._offsets[start]
        stop = min(start + most, len(self))
        while stop > start + 1 and self._offsets[stop - 1] + self._lengths[stop - 1] - first > BLOCK:
            stop = (start + stop) // 2
        data = self._text.read(first, self._offsets[stop - 1] + self._lengths[stop - 1] - first)
        places = zip(self._offsets[start:stop], self._lengths[start:stop], strict=True)
        return [data[offset - first : offset - first + length] for offset, length in places]


class JsonArrayFile:
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

    def __getitem__(self, index: int) -> tuple[int, Row]:
        return index + 1, _require_mapping(self._rows[index], self.path, index + 1)


class CsvTable:
    """A csv file with a header; values stay text, so that an answer "007" does not become 7."""

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

    def __getitem__(self, index: int) -> tuple[int, Row]:
        cells, expected = self._rows[index], len(self._header)
        if len(cells) != expected:
            raise DataError(f"{self.path}:{index + 1}: the row has {len(cells)} fields but the header has {expected}")
        return index + 1, dict(zip(self._header, cells, strict=True))


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _unpack(path: Path) -> BinaryIO:
    import pyarrow

    unpacked: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
    by_lines, length = _is_jsonl(path), 0  # bytes of the current line
    try:
        with pyarrow.input_stream(str(path), compression=PACKED[path.suffix.lower()]) as stream:
            while block := stream.read(BLOCK):
                end = block.rfind(b"\n")
                if by_lines and length > MAX_ROW_BYTES and end < 0:
                    continue  # refused by its length already: a small file can decompress to terabytes
                length = length + len(block) if end < 0 else len(block) - end - 1
                unpacked.write(block)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be unpacked, it may be cut off or no {path.suffix} file ({error})") from error
    unpacked.flush()
    return unpacked


def _parse(data: bytes) -> object:
    """Parse JSON. Raises ValueError: broken, not UTF-8, a repeated key, half of a surrogate pair."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error}") from error
    value = json.loads(text, object_pairs_hook=_once)
    if b"\\ud" in data or b"\\uD" in data:  # the only way to write half of a surrogate pair
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"half of a surrogate pair, which is no text: {error.reason}") from error
    return value


def _once(pairs: list[tuple[str, object]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _holds_lines(text: TextFile) -> bool:
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
    return not columns  # one object of lists is a columnar table


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in [suffix.lower() for suffix in path.suffixes[-2:]]


def _line_lengths(file: BinaryIO) -> Iterator[tuple[int, bool]]:
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


def _require_mapping(row: object, path: Path, number: int) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: a row must be an object with named columns, found {type(row).__name__}")
    return row
