"""Read rows from local files, folders, hub names, and lists of these, as one sequence.

A source is written as
    data/train.jsonl          a file (json, jsonl, parquet, csv)
    data/gsm8k@test           a folder, and the split whose files to read (default: train), or a folder that
                              `datasets` saved a data set to
    json@./data               every json file of a folder, whatever its name (also jsonl, parquet, csv)
    hiyouga/geometry3k@train  a hub name and a split; `name:configuration#revision@split` in full
    reasoning_gym:maze:size=9 a task of reasoning-gym, with arguments
    …@train[:1000]            of any of these, a slice in rows or percent
"""

import difflib
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from r1_data.tables.arrow import ArrowTable, open_hub, saved_splits
from r1_data.tables.files import KINDS, count_table, kind_of, open_table
from r1_data.tables.gym import PREFIX, GymTable, GymTask, parse_task
from r1_data.tables.spec import Slice, split_slice
from r1_data.tables.table import ListTable, Rows, Table, Window
from r1_data.types import DataError, Row

if TYPE_CHECKING:
    import datasets

log = logging.getLogger("r1_data")

_SUPPORTED = ", ".join(suffix[1:] for suffix in KINDS)
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?::([\w.() -]+))?(?:#([\w./-]+))?")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # metadata of the hub
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    kind: str
    label: str

    def count(self) -> int:
        return count_table(self.path, self.kind)

    def open(self) -> Table:
        return open_table(self.path, self.kind)

    @property
    def identity(self) -> str:
        return str(self.path.resolve())

    def relabel(self, depth: int) -> "_File":
        return replace(self, label="/".join(self.path.resolve().parts[-depth:]))


@dataclass(frozen=True, slots=True)
class _Hub:
    name: str
    configuration: str | None
    revision: str | None
    split: str
    label: str

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.configuration}#{self.revision}@{self.split}"

    def count(self) -> None:
        return None

    def open(self) -> Table:
        try:
            return open_hub(self.name, self.configuration, self.split, self.revision)
        except DataError as error:
            near = _near(Path(self.name))
            raise DataError(f"{self.name!r} is no file or folder under {Path.cwd()}{near}, and {error}") from error

    def relabel(self, depth: int) -> "_Hub":
        return self  # hub names are unique


@dataclass(frozen=True, slots=True)
class _Gym:
    task: GymTask
    identity: str  # as written
    label: str

    def count(self) -> int:
        return self.task.size

    def open(self) -> Table:
        return GymTable(self.task)

    def relabel(self, depth: int) -> "_Gym":
        return replace(self, label=self.identity)


_Part = _File | _Hub | _Gym


@dataclass(frozen=True, slots=True)
class _Source:
    spec: str
    parts: tuple[_Part, ...]
    rows_slice: Slice | None

    def count(self) -> int | None:
        counts = [part.count() for part in self.parts]
        if None in counts:
            return None
        total = sum(count for count in counts if count is not None)
        return total if self.rows_slice is None else len(self._selected(total))

    def open(self) -> list[tuple[str, Table]]:
        tables = [(part.label, part.open()) for part in self.parts]
        if self.rows_slice is None:
            return tables
        selected, start, windows = self._selected(sum(len(table) for _, table in tables)), 0, list[tuple[str, Table]]()
        for label, table in tables:
            rows = range(max(selected.start - start, 0), min(selected.stop - start, len(table)))
            windows += [(label, Window(table, rows))] if rows else []
            start += len(table)
        return windows

    def _selected(self, total: int) -> range:
        assert self.rows_slice is not None
        selected = self.rows_slice.rows(total)
        if not selected:
            raise DataError(f"{self.spec!r}: the slice {self.rows_slice} holds none of the {total} rows")
        return selected


def as_rows(
    rows: "Sequence[tuple[str, Row]] | Sequence[Mapping[str, object]] | datasets.Dataset",
) -> Sequence[tuple[str, Row]]:
    """Return mappings, or a `datasets.Dataset`, with row ids "row:1", "row:2", …; rows with ids stay as they are."""
    if hasattr(rows, "with_format"):
        return Rows([("row", ArrowTable(rows.with_format("arrow")))])
    if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Mapping):
        return Rows([("row", ListTable(rows))])
    return cast("Sequence[tuple[str, Row]]", rows)


def read_rows(spec: str | list[str]) -> Rows:
    """Open every source of `spec` as one sequence.

    Raises DataError for a missing file or an unknown kind.
    """
    return read_sources([spec])[0]


def read_sources(specs: Sequence[str | list[str]]) -> list[Rows]:
    """Open several sources, each as its own sequence; row ids are unique over all. Raises as `read_rows`."""
    groups = [[spec] if isinstance(spec, str) else spec for spec in specs]
    sources = iter(_resolve_all([spec for group in groups for spec in group]))
    return [Rows([table for _ in group for table in next(sources).open()]) for group in groups]


def count_rows(spec: str | list[str]) -> int | None:
    """Count the rows of local sources without torch; None if one is a hub name."""
    counts = [source.count() for source in _resolve_all([spec] if isinstance(spec, str) else spec)]
    return None if None in counts else sum(count for count in counts if count is not None)


def _resolve_all(specs: list[str]) -> list[_Source]:
    if not specs:
        raise DataError("no data source is given; name a file, a folder or a hub dataset")
    return _disambiguate_labels([_resolve(spec) for spec in specs])


def _resolve(spec: str) -> _Source:
    if not spec.strip():
        raise DataError("a data source without a name is given; name a file, a folder or a hub dataset")
    try:
        if exists(Path(spec).expanduser()):  # a name may end in brackets
            return _Source(spec, tuple(_parts(spec)), None)
        source, rows_slice = split_slice(spec)
        return _Source(spec, tuple(_parts(source)), rows_slice)
    except (OSError, RuntimeError) as error:  # a name too long, an unknown home, a folder without permission
        raise DataError(f"{spec!r} cannot be opened ({error})") from error


def _parts(spec: str) -> Sequence[_Part]:
    path = Path(spec).expanduser()
    if isfile(path):
        return [_as_file(path)]
    if isdir(path):
        return _split_files(path, "train")
    if exists(path):
        raise DataError(f"{path}: not a file or a folder, but a pipe or a device")
    if spec.startswith(PREFIX):
        task = parse_task(spec)
        return [_Gym(task, spec, task.name)]
    head, at, tail = spec.rpartition("@")
    if not at:
        head, tail = spec, "train"
    elif f".{head}" in KINDS:
        return _folder_of_kind(Path(tail).expanduser(), KINDS[f".{head}"])
    path = Path(head).expanduser()
    if isdir(path):
        return _split_files(path, tail)
    if isfile(path):
        raise DataError(f"{spec!r}: {head} is one file and has no splits; write it without '@{tail}'")
    hub = _HUB_NAME.fullmatch(head)
    if hub is None or kind_of(path):
        raise DataError(f"{head!r} does not exist (working directory: {Path.cwd()}){_near(path)}")
    return [_Hub(hub[1], hub[2], hub[3], tail, f"{head}@{tail}")]


def _as_file(path: Path) -> _File:
    kind = kind_of(path)
    if kind is None:
        raise DataError(f"{path}: files of kind {path.suffix or 'without suffix'!r} are not read; use {_SUPPORTED}")
    return _File(path, kind, path.name)


def _data_files(folder: Path) -> list[_File]:
    paths = (
        path
        for path in sorted(folder.rglob("*"))
        if kind_of(path)
        and path.name not in _NOT_ROWS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and isfile(path)
    )
    return [_as_file(path) for path in paths]


def _folder_of_kind(folder: Path, kind: str) -> list[_File]:
    if not isdir(folder):
        raise DataError(f"'{kind}@{folder}': no such folder (working directory: {Path.cwd()}){_near(folder)}")
    files = [file for file in _data_files(folder) if file.kind == kind]
    if not files:
        raise DataError(f"{folder}: holds no {kind} file")
    return files


def _split_files(folder: Path, split: str) -> list[_File]:
    """Return the files of a split; a folder in which no file names a split is all train."""
    if saved := saved_splits(folder):
        return [_saved(folder, saved, split)]
    files = _data_files(folder)
    if not files:
        raise DataError(f"{folder}: holds no data file; the kinds read are {_SUPPORTED}")
    kinds = sorted({file.kind for file in files})
    if len(kinds) > 1:
        raise DataError(f"{folder}: holds files of several kinds ({', '.join(kinds)}); write '{kinds[0]}@{folder}'")
    split = next((name for name, words in _SPLIT_WORDS.items() if split in words), split)
    splits = {file: _split_of(file.path.relative_to(folder), split) for file in files}
    chosen = [file for file in files if splits[file] == split]
    if chosen:
        _warn_unread(folder, tuple(file.path.name for file in files if splits[file] is None))
        return chosen
    found = sorted({name for name in splits.values() if name})
    if not found and split == "train":
        return files
    raise DataError(f"{folder}: no file of split {split!r}; splits found: {', '.join(found) or 'none'}")


@cache
def _warn_unread(folder: Path, names: tuple[str, ...]) -> None:
    if names:
        shown = ", ".join(names[:3]) + (", …" if names[3:] else "")
        log.warning("%s: %d files that no split is named in are not read: %s", folder, len(names), shown)


def _saved(folder: Path, saved: Mapping[str, Path], split: str) -> _File:
    aliases = next((words for words in _SPLIT_WORDS.values() if split in words), (split,))
    name = next((name for name in saved if name in (split, *aliases) or (not name and "train" in aliases)), None)
    if name is None:
        found = ", ".join(filter(None, saved)) or "none"
        raise DataError(f"{folder}: no split {split!r} was saved; splits found: {found}")
    return _File(saved[name], "arrow", folder.name + (f"/{name}" if name else ""))


def _split_of(path: Path, requested: str) -> str | None:
    words_of = {requested: (requested.lower(),), **_SPLIT_WORDS}
    for part in (path.stem, *reversed(path.parent.parts)):
        words = {part.lower(), *re.split(r"[^a-z0-9]+", part.lower())}
        for split, aliases in words_of.items():
            if words.intersection(aliases):
                return split
    return None


def _disambiguate_labels(sources: list[_Source]) -> list[_Source]:
    """Give files of the same name the shortest labels that differ.

    Slices of one file are labelled by the slice: `train.jsonl[:100]`.
    """
    slices = Counter((part.identity, source.rows_slice) for source in sources for part in source.parts)
    twice = [identity for (identity, _), count in slices.items() if count > 1]
    if twice:
        raise DataError(f"{twice[0]} is given twice; a source may stand in the list once")
    shared = Counter(identity for identity, _ in slices)
    depth, labels = 1, {part.identity: part.label for source in sources for part in source.parts}
    while len(set(labels.values())) < len(labels):
        depth += 1
        labels = {part.identity: part.relabel(depth).label for source in sources for part in source.parts}

    def relabel(part: _Part, rows_slice: Slice | None) -> _Part:
        own = str(rows_slice) if rows_slice and shared[part.identity] > 1 else ""
        return replace(part, label=labels[part.identity] + own)

    return [
        replace(source, parts=tuple(relabel(part, source.rows_slice) for part in source.parts)) for source in sources
    ]


def _near(path: Path) -> str:
    folder, requested = path.parent, path.name
    while not isdir(folder) and folder != folder.parent:
        folder, requested = folder.parent, folder.name
    names = os.listdir(folder) if os.access(folder, os.R_OK) else []
    close = difflib.get_close_matches(requested, names, n=3, cutoff=0.5)
    return f"; did you mean {', '.join(str(folder / name) for name in close)}?" if close else ""
