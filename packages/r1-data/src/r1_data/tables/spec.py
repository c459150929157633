"""Parse source specifications: slices (`[:1000]`, `[-200:]`, `[10%:20%]`, as on the hub), names, answers per prompt."""

import re
from dataclasses import dataclass
from os.path import exists
from pathlib import Path

from r1_data.tables.files import KINDS
from r1_data.tables.gym import PREFIX
from r1_data.types import DataError

_ANSWERS = re.compile(r"Avg@?(\d+)")  # RLPR names its files AIME2024_Avg16.parquet
_SLICE = re.compile(r"(?P<source>.*)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]")


@dataclass(frozen=True, slots=True)
class Slice:
    """Begin and end of a slice, in rows or percent; negative numbers count from the end.

    Example: `Slice("10%", "20%").rows(50) == range(5, 10)`
    """

    start: str = ""
    stop: str = ""

    def __str__(self) -> str:
        return f"[{self.start}:{self.stop}]"

    def rows(self, size: int) -> range:
        """Return the rows of the slice, numbered from 0; bounds beyond the ends are clipped, as in Python."""
        return range(size)[_bound(self.start, size) : _bound(self.stop, size)]


def split_slice(spec: str) -> tuple[str, Slice | None]:
    """Split `name@train[:1000]` into its source and its slice.

    Raises DataError for brackets without a slice, and for more than 100 percent.
    """
    if not spec.endswith("]"):
        return spec, None
    found = _SLICE.fullmatch(spec)
    if found is None and spec.startswith(PREFIX):  # it ends with an argument that is a list
        return spec, None
    if found is None:
        raise DataError(f"{spec!r}: a slice is written [start:stop], in rows or percent, such as [:1000] or [10%:20%]")
    found_slice = Slice(found["start"] or "", found["stop"] or "")
    for bound in (found_slice.start, found_slice.stop):
        if bound.endswith("%") and abs(int(bound[:-1])) > 100:
            raise DataError(f"{spec!r}: {bound} is more than all rows")
    return found["source"], found_slice


def _bound(text: str, size: int) -> int | None:
    if not text:
        return None
    if not text.endswith("%"):
        return int(text)
    rows = round(abs(int(text[:-1])) * size / 100)
    return size - rows if text.startswith("-") else rows


def name_source(spec: str) -> str:
    """Return a short name for a source.

    Example: `AIME_Avg16` for `data/AIME_Avg16.parquet`, `gsm8k` for `openai/gsm8k:main@train[:9]`, `a` for `json@./a`,
    `maze` for `reasoning_gym:maze:size=9`.
    """
    if spec.startswith(PREFIX):
        return spec.removeprefix(PREFIX).partition(":")[0].partition("[")[0]
    path = _without_split(spec)
    return path.stem if path.suffix.lower() in KINDS else path.name or spec


def answers_per_prompt(spec: str) -> int | None:
    """Return k if a file's or folder's name contains `Avg<k>`, as RLPR's do (arXiv 2506.18254); else None."""
    found = _ANSWERS.search(_without_split(spec).name)
    return int(found[1]) if found and int(found[1]) > 0 else None


def _without_split(spec: str) -> Path:
    if exists(spec):
        return Path(spec)
    try:
        source, _ = split_slice(spec)
    except DataError:  # raised again when the rows are read
        source = spec
    head, at, tail = source.rpartition("@")
    if at:
        source = tail if f".{head}" in KINDS else head
    path = Path(source)
    return path if exists(path) else Path(re.split("[:#]", source, maxsplit=1)[0])
