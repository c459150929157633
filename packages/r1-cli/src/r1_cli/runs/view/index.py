"""An index of the recorded answers of a phase: numbers by answer and by group, read on when files change."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from r1_cli.runs.reader import FORKED, Phase, RunReader
from r1_cli.runs.view.kept import Identity, keep_tables, kept_tables

if TYPE_CHECKING:
    import pyarrow as pa

Column = npt.NDArray[Any]
Columns = dict[str, Column]  # by name, one entry for each answer or group

READ = ("group", "sample", "score", "finish_reason", "failure", "prompt_id", "source", "stop_reason")
ENCODED = ("finish_reason", "failure", "prompt_id", "source", "stop_reason")
PARQUET = b"PAR1"  # the last bytes of a complete file
READERS = 4  # threads


@dataclass(frozen=True)
class Index:
    """Answers without forks, by step, group and sample.

    Of an answer: `group`, its place in `groups`; `sample`, `score` (NaN: none), `truncated`, `failed`, and `row` in its
    file. Of a group: `step`, `group`, `prompt_id`, `source`, `mean` and `spread` (standard deviation) of the finite
    scores, `flat` if these are equal, and `begin`, its first answer; `begin` has one entry more, where the last ends.
    """

    answers: Columns
    groups: Columns


class Indexer:
    def __init__(self, run: RunReader, phase: Phase) -> None:
        self._run, self._phase, self._lock = run, phase, threading.RLock()
        self._complete: dict[Path, tuple[Identity, bool]] = {}
        self._tables: dict[int, tuple[Identity, pa.Table | None]] | None = None  # by step; None: unreadable
        self._lengths: dict[int, tuple[Identity | None, Column]] = {}
        self._index = _index({})

    def steps(self) -> list[int]:
        """Return the recorded steps whose files are complete, without reading them."""
        with self._lock:
            return [*self._files()]

    def read(self) -> Index:
        """Return the index of what is there now; the same object if nothing has changed."""
        with self._lock:
            files = self._files()
            known = kept_tables(self._run.path, self._phase) if self._tables is None else self._tables
            stays = {step: known[step] for step, now in files.items() if step in known and known[step][0] == now}
            if self._tables is not None and len(stays) == len(files) == len(known):
                return self._index
            missing = [step for step in files if step not in stays]
            with ThreadPoolExecutor(READERS) as pool:
                read = dict(zip(missing, pool.map(self._read_file, missing), strict=True))
            self._tables = {step: stays.get(step) or (now, read[step]) for step, now in files.items()}
            keep_tables(self._run.path, self._phase, self._tables, new=len(missing))
            self._index = _index({step: table for step, (_, table) in self._tables.items() if table is not None})
            return self._index

    def identity(self, step: int) -> Identity | None:
        """Return which file of a step is indexed; None if none is."""
        return (self._tables or {}).get(step, (None, None))[0]

    def lengths(self, step: int) -> Column:
        """Return the number of tokens of each row of a step's file; zeros if it was removed."""
        with self._lock:
            identity, known = self.identity(step), self._lengths.get(step)
            if known is None or known[0] != identity:
                try:
                    tokens = self._run.sample_table(step, self._phase, ["tokens"])["tokens"].combine_chunks()
                    ends = np.frombuffer(tokens.buffers()[1], np.int32)[: len(tokens) + 1]
                    known = identity, np.diff(ends)
                except FileNotFoundError:
                    known = identity, np.zeros(max(self._index.answers["row"], default=-1) + 1, int)
                self._lengths[step] = known
            return known[1]

    def _files(self) -> dict[int, Identity]:
        found: dict[int, Identity] = {}
        complete: dict[Path, tuple[Identity, bool]] = {}
        for path in self._run.sample_paths(self._phase):
            try:
                status = path.stat()
                now = (status.st_ino, status.st_mtime_ns)
                known = self._complete.get(path)
                complete[path] = known if known and known[0] == now else (now, _is_complete(path))
            except FileNotFoundError:
                continue
            if complete[path][1]:
                found[int(path.name.split("-")[0])] = now
        self._complete = complete
        return found

    def _read_file(self, step: int) -> "pa.Table | None":
        import pyarrow as pa

        try:
            return _encode(self._run.sample_table(step, self._phase, READ, ENCODED))
        except (OSError, pa.ArrowException):
            return None


def _encode(table: "pa.Table") -> "pa.Table":
    """Return the table in one form, whatever version has written it: texts as dictionaries."""
    import pyarrow as pa

    from r1_cli.runs.schema import SCHEMA

    for place, name in enumerate(READ):
        kind = pa.dictionary(pa.int32(), pa.string()) if name in ENCODED else SCHEMA.field(name).type
        if table[name].type != kind:
            column = table[name].dictionary_encode() if name in ENCODED else table[name].cast(kind)
            table = table.set_column(place, name, column)
    return table.replace_schema_metadata(None)


def _is_complete(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - len(PARQUET), 0))
        return size > 2 * len(PARQUET) and file.read() == PARQUET


def _index(tables: "Mapping[int, pa.Table]") -> Index:
    import pyarrow as pa

    whole = pa.concat_tables(tables.values()).unify_dictionaries() if tables else None
    read = {name: _numbers(whole[name].combine_chunks()) if whole else _NOTHING for name in READ}
    step = np.repeat(np.array([*tables], int), [len(one) for one in tables.values()])
    row = np.concatenate([np.empty(0, int), *(np.arange(len(one)) for one in tables.values())])
    (group, _), (sample, _) = read["group"], read["sample"]
    order = np.lexsort((sample, group, step))
    order = order[~_equals(read["stop_reason"], FORKED)[order]]
    key = step[order].astype(np.int64) << 32 | group[order].astype(np.int64)
    names, begin, member = np.unique(key, return_index=True, return_inverse=True)
    answers: Columns = {
        "group": member,
        "sample": sample[order],
        "row": row[order],
        "score": read["score"][0][order],
        "truncated": _equals(read["finish_reason"], "length")[order],
        "failed": read["failure"][0][order] >= 0,
    }
    groups: Columns = {
        "step": names >> 32,
        "group": names & 0xFFFFFFFF,
        "begin": np.append(begin, len(order)),
        **_summary(answers["score"], member, len(names)),
    }
    for name in ("prompt_id", "source"):
        codes, words = read[name]
        groups[name] = np.array([*words, None], object)[codes[order[begin]]]  # -1 is None
    return Index(answers, groups)


_NOTHING: tuple[Column, list[str]] = (np.empty(0, int), [])


def _numbers(column: "pa.Array") -> tuple[Column, list[str]]:
    """Return the numbers of a column, NaN for null; of texts their places in a list, which comes too, -1 for null.

    Arrow's own conversions import pandas, which takes longer than to read 100,000 answers.
    """
    texts = hasattr(column, "dictionary")
    array = column.indices if texts else column
    values = np.frombuffer(array.buffers()[1] or b"", np.float64 if str(array.type) == "double" else np.int32)
    values = values[array.offset : array.offset + len(array)]
    if array.null_count:
        valid = np.from_dlpack(array.is_valid().cast("int8")).astype(bool)
        values = np.where(valid, values, -1 if texts else np.nan)
    return values, column.dictionary.to_pylist() if texts else []


def _equals(column: tuple[Column, list[str]], word: str) -> Column:
    codes, words = column
    return codes == (words.index(word) if word in words else -2)


def _summary(score: Column, member: Column, count: int) -> Columns:
    known = np.isfinite(score)
    member, score = member[known], score[known]
    number = np.bincount(member, minlength=count)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(member, score, minlength=count) / number
        spread = np.sqrt(np.bincount(member, (score - mean[member]) ** 2, minlength=count) / number)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, member, score)
    np.maximum.at(high, member, score)
    flat = low >= high
    return {"mean": mean, "spread": np.where(flat & (number > 0), 0.0, spread), "flat": flat}
