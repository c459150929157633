"""The recorded answers of a run: numbers in memory, texts and tokens read on request."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from r1_cli.runs.conversation import prompt_media, read_turns
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import FORKED, Phase, Row, RunReader
from r1_cli.runs.view.pieces import TokenTexts

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = dict[str, npt.NDArray[Any]]  # by column, one entry for each answer

PREVIEW = 160  # characters of a text in a list
KEPT_FILES = 8  # whose texts stay in memory
KEPT_SEARCHES = 8
NUMBERS = ("step", "group", "sample", "score", "length", "truncated", "failed", "flat")
LIGHT = ("step", "group", "sample", "score", "finish_reason", "failure", "tokens", "prompt_id", "stop_reason")
SORTS = ("step", "score", "length")
FILTERS = ("flat", "truncated", "failed")


class Samples:
    def __init__(self, run: RunReader, phase: Phase) -> None:
        self._run, self._phase, self._lock = run, phase, threading.RLock()
        self._token_texts = TokenTexts(run)
        self._parts: dict[Path, tuple[tuple[int, int], Numbers]] = {}  # by file: what it was, its numbers
        self._index: Numbers = _join([])
        self._files: list[Path] = []
        self._texts: OrderedDict[Path, pa.Table] = OrderedDict()
        self._found: OrderedDict[tuple[Path, str], npt.NDArray[np.bool_]] = OrderedDict()

    def steps(self) -> list[int]:
        with self._lock:
            self._read_on()
            return [int(step) for step in np.unique(self._index["step"])]

    def page(
        self, *, begin: int, count: int, step: int | None, search: str, filters: list[str], sort: str, down: bool
    ) -> JsonObject:
        """Return {"total", "rows"}: `count` matching answers from the `begin`-th on, texts shortened, without forks.

        Args: step: None: all. search: in prompt and answer, ignoring case. filters: of `FILTERS`; all must hold. sort:
        of `SORTS`; `down` puts the highest first.
        """
        with self._lock:
            self._read_on()
            index = self._index
            passing = ~index["fork"]
            for name in filters:
                passing &= index[name]
            if step is not None:
                passing &= index["step"] == step
            if search:
                self._search(search, passing)
            chosen = np.flatnonzero(passing)
            keys = np.nan_to_num(index[sort][chosen], nan=-np.inf)
            chosen = chosen[np.argsort(-keys if down else keys, kind="stable")]
            return {"total": len(chosen), "rows": [self._light(place) for place in chosen[begin : begin + count]]}

    def group(self, step: int, group: int) -> list[Row]:
        """Return a prompt's rows at a step; [] if missing.

        `pieces` has the text of each token, `prompt_media` the prompt's pictures, `turns` an episode (`read_turns`).
        """
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        path = self._run.sample_path(step, self._phase)
        with self._lock:
            self._read_on()
            if path not in self._parts:
                return []
        shown = [name for name in pq.read_schema(path).names if not name.startswith("teacher_top")]  # hundreds a token
        table = pq.read_table(path, columns=shown, partitioning=None)
        rows = table.filter(pc.equal(table["group"], group)).to_pylist()
        for row in rows:
            row["parts"] = dict(row.get("parts") or ())
            row["pieces"] = self._token_texts.decode(row["tokens"])
            row["prompt_media"], row["turns"] = prompt_media(row), read_turns(row)
        return rows

    def same(self, prompt_id: str) -> list[JsonObject]:
        """Return the groups of a prompt: step, group and mean score of each."""
        with self._lock:
            self._read_on()
            of_prompt = (self._index["prompt_id"] == prompt_id) & ~self._index["fork"]
            pairs = np.stack([self._index["step"][of_prompt], self._index["group"][of_prompt]], axis=1)
            scores = self._index["score"][of_prompt]
            return [
                {"step": int(s), "group": int(g), "score": float(np.mean(scores[(pairs == (s, g)).all(axis=1)]))}
                for s, g in np.unique(pairs, axis=0)
            ]

    def _search(self, text: str, passing: npt.NDArray[np.bool_]) -> None:
        import pyarrow.compute as pc

        for number, path in enumerate(self._files):
            inside = np.flatnonzero((self._index["file"] == number) & passing)
            if not len(inside):
                continue
            if (path, text) not in self._found:
                texts = self._text(path)
                hits = [pc.match_substring(texts[name], text, ignore_case=True) for name in ("prompt", "answer")]
                self._found[path, text] = pc.fill_null(pc.or_(*hits), False).to_numpy()
            hit = self._found[path, text]
            passing[inside] = hit[self._index["row"][inside]]
        while len(self._found) > KEPT_SEARCHES * max(len(self._files), 1):
            self._found.popitem(last=False)

    def _light(self, place: int) -> JsonObject:
        texts, row = self._text(self._files[self._index["file"][place]]), int(self._index["row"][place])
        found = {name: self._index[name][place].item() for name in NUMBERS}
        for name in ("prompt", "answer"):
            found[name] = (texts[name][row].as_py() or "")[-PREVIEW if name == "prompt" else 0 :][:PREVIEW]
        return found

    def _text(self, path: Path) -> "pa.Table":
        import pyarrow as pa
        import pyarrow.parquet as pq

        if path not in self._texts:
            try:
                self._texts[path] = pq.read_table(
                    path, columns=["prompt", "answer"], partitioning=None
                ).combine_chunks()
            except FileNotFoundError:
                empty = pa.array([""] * len(self._parts[path][1]["step"]))
                return pa.table({"prompt": empty, "answer": empty})
        self._texts.move_to_end(path)
        while len(self._texts) > KEPT_FILES:
            self._texts.popitem(last=False)
        return self._texts[path]

    def _read_on(self) -> None:
        seen: dict[Path, tuple[int, int]] = {}
        for path in self._run.sample_paths(self._phase):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            seen[path] = (status.st_ino, status.st_mtime_ns)
        if seen == {path: what for path, (what, _) in self._parts.items()}:
            return
        parts = {}
        for path, what in seen.items():
            known = self._parts.get(path)
            if known and known[0] == what:
                parts[path] = known
            elif numbers := _numbers(path):
                parts[path] = (what, numbers)
                self._texts.pop(path, None)
                self._found = OrderedDict((key, hit) for key, hit in self._found.items() if key[0] != path)
        self._parts, self._files = parts, list(parts)
        self._index = _join([numbers for _, numbers in parts.values()])


def _numbers(path: Path) -> Numbers | None:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        written = {*pq.read_schema(path).names}
        table = pq.read_table(path, columns=[name for name in LIGHT if name in written], partitioning=None)
    except (OSError, pa.ArrowException):
        return None
    found = {name: table[name].to_numpy() for name in ("step", "group", "sample")}
    found["score"] = table["score"].cast(pa.float64()).to_numpy(zero_copy_only=False)
    found["length"] = pc.fill_null(pc.list_value_length(table["tokens"]), 0).to_numpy()
    found["truncated"] = pc.fill_null(pc.equal(table["finish_reason"], "length"), False).to_numpy()
    found["failed"] = table["failure"].is_valid().to_numpy()
    found["prompt_id"] = np.array(table["prompt_id"].to_pylist(), object)
    found["row"] = np.arange(len(table))
    found["fork"] = np.zeros(len(table), bool)
    if "stop_reason" in written:
        found["fork"] = pc.fill_null(pc.equal(table["stop_reason"], FORKED), False).to_numpy()
    _, group = np.unique(found["group"], return_inverse=True)
    low, high = np.full(len(table), np.inf), np.full(len(table), -np.inf)
    np.fmin.at(low, group, found["score"])
    np.fmax.at(high, group, found["score"])
    found["flat"] = (low >= high)[group]
    return found


def _join(parts: list[Numbers]) -> Numbers:
    names = (*NUMBERS, "prompt_id", "row", "fork")
    kinds = {"score": float, "prompt_id": object, "truncated": bool, "failed": bool, "flat": bool, "fork": bool}
    index = {name: np.concatenate([np.empty(0, kinds.get(name, int)), *(p[name] for p in parts)]) for name in names}
    index["file"] = np.repeat(np.arange(len(parts)), [len(part["step"]) for part in parts])
    return index
