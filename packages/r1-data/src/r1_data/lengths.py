"""Measure the length of every row without decoding media: from a cache of earlier runs, else by workers.

The cache key is a hash of the example and of everything that determines its rendering, so only new rows of a dataset
that grew are measured, and every change is noticed.
"""

import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r1_data.prefetch import ItemRenderer
from r1_data.references import Video, is_pil
from r1_data.types import Conversation, DataError, Example, Item, MediaError, MediaReference
from r1_data.workers import WorkerDied, Workers
from r1_data.workers.spread import map_examples

log = logging.getLogger("r1_data")

MANY = 1000  # rows; fewer are measured faster than the cache opens
MANY_TEXTS = 20_000  # rows without media; fewer are measured faster than workers start
_COMMIT = 10_000  # lengths written at a time
_MOST = 5_000_000  # lengths in the file, about 200 MB

Length = tuple[int, int | DataError]  # (index of the row, tokens or why it cannot be used)


class KnownLengths:
    """A cache of lengths in an SQLite file that several runs may use at once."""

    def __init__(self, path: str | Path, fingerprint: str) -> None:
        """`fingerprint` is the renderer's. Raises OSError or sqlite3.Error."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fingerprint, self._path = fingerprint.encode(), path
        self._new: dict[bytes, int] = {}
        self._broken = False
        self._file = sqlite3.connect(path, timeout=30)
        self._file.execute("CREATE TABLE IF NOT EXISTS lengths (key BLOB PRIMARY KEY, tokens INTEGER NOT NULL)")

    def key(self, example: Example | Conversation) -> bytes | None:
        """Return the cache key of an item; None if a medium may change unnoticed."""
        digest = hashlib.blake2b(self._fingerprint, digest_size=16)
        digest.update(json.dumps(example.messages, sort_keys=True, default=str).encode())
        if example.tools:  # in the order of their fields, in which templates write them
            digest.update(json.dumps(example.tools, default=str).encode())
        if isinstance(example, Conversation):
            digest.update(repr(example.identity[3:]).encode("utf-8", "backslashreplace"))
        for reference in example.media:
            identity = _identity(reference)
            if identity is None:
                return None
            digest.update(identity)
        return digest.digest()

    def get(self, key: bytes) -> int | None:
        if key in self._new:
            return self._new[key]
        if self._broken:
            return None
        try:
            found = self._file.execute("SELECT tokens FROM lengths WHERE key = ?", (key,)).fetchone()
            return None if found is None else int(found[0])
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._give_up("read", error)
            return None

    def put(self, key: bytes, tokens: int) -> None:
        self._new[key] = tokens
        if len(self._new) >= _COMMIT:
            self._save()

    def close(self) -> None:
        self._save()
        with contextlib.suppress(sqlite3.Error):
            self._file.close()

    def _save(self) -> None:
        oldest = "SELECT max(rowid) FROM lengths"  # row ids increase with time
        if self._broken:
            return
        try:
            with self._file:
                self._file.executemany("INSERT OR REPLACE INTO lengths VALUES (?, ?)", self._new.items())
                self._file.execute(f"DELETE FROM lengths WHERE rowid <= ({oldest}) - ?", (_MOST,))
        except sqlite3.Error as error:
            self._give_up("written", error)
        self._new = {}

    def _give_up(self, what: str, error: Exception) -> None:
        log.warning("%s cannot be %s (%s): this check will not be remembered", self._path, what, error)
        self._broken = True


def open_known(folder: str | Path | None, renderer: ItemRenderer[Any, Any]) -> KnownLengths | None:
    """Open the cache in `folder`; None without a folder, or, with a warning, if it cannot be used."""
    if folder is None:
        return None
    path = Path(folder).expanduser() / "lengths.sqlite"
    try:
        return KnownLengths(path, renderer.fingerprint())
    except (OSError, sqlite3.Error) as error:
        log.warning("%s cannot be used (%s): the check of this run will not be remembered", path, error)
        return None


def measure_all(
    examples: Iterable[tuple[int, Item | DataError]],
    renderer: ItemRenderer[Item, Any],
    workers: Workers | None,
    known: KnownLengths | None,
    *,
    limit: int | None = None,
    many: bool = True,
) -> Iterator[Length]:
    """Yield the length of every example, in order; errors are passed on.

    For `limit` see `Renderer.measure`; `Overlong` is not cached. Unless there are `many`, this process measures texts,
    which is faster than starting workers.
    """

    def look_up() -> Iterator[tuple[_Measured, Item | None]]:
        for index, example in examples:
            if isinstance(example, DataError):
                yield _Measured(index, example), None
                continue
            key = known.key(example) if known else None
            length: int | DataError | None = known.get(key) if known and key else None
            yield _Measured(index, length, example.id, key), example if length is None else None

    found = map_examples(
        look_up(),
        workers,
        "measure",
        renderer.measure,
        is_local=lambda example: not (many or example.media),
        arguments=(limit,),
    )
    for item, result in found:
        length = MediaError(f"{item.id}: {result}") if isinstance(result, WorkerDied) else result
        if item.length is not None:
            length = item.length
        elif known and item.key and isinstance(length, int):
            known.put(item.key, length)
        assert length is not None  # every item is an error, in the cache, or measured
        yield item.index, length


@dataclass(frozen=True, slots=True)
class _Measured:
    index: int
    length: int | DataError | None  # None: not cached
    id: str = ""
    key: bytes | None = None


def _identity(reference: MediaReference) -> bytes | None:
    if isinstance(reference, Video):
        source = reference.source if isinstance(reference.source, tuple) else (reference.source,)
        parts = [_identity(part) for part in source]
        known = [part for part in parts if part is not None]
        return repr(("video", reference.fps, known)).encode() if len(known) == len(parts) else None
    if isinstance(reference, bytes):
        return hashlib.blake2b(reference, digest_size=16).digest()
    if isinstance(reference, Path):
        try:
            status = reference.stat()
        except OSError:
            return None
        return repr((str(reference.absolute()), status.st_size, status.st_mtime_ns)).encode()
    return repr(reference.size).encode() if is_pil(reference) else None
