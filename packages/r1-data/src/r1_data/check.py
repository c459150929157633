"""Examining rows without a model: what each one is, and everything that would make it unusable, named by row."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from r1_data.references import digest_content
from r1_data.render import Renderer
from r1_data.types import DataError, Example

_CHUNK = 32  # rows that a worker takes at a time
_IN_PROCESS = 256  # fewer rows are not worth starting processes for


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found of one row.

    Example: `Examined(0, 16, "train.parquet:17", 93, 1, "3", b"…", "markers", "2 <image> markers but 1 pictures …")`
    """

    source: int  # which of the sources
    index: int  # of the row in its source, from 0
    id: str
    tokens: int | None = None  # of the prompt, media included; None where it cannot be rendered
    media: int = 0
    answer: str | None = None
    digest: bytes = b""  # equal for rows that ask the same: messages and media
    kind: str = ""  # what is wrong, "" if the row can be used: a `DataError.kind`, "overlong", "media", …
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Examiner:
    """One source, ready to be examined row by row."""

    label: str  # of rows that cannot even be read
    rows: Sequence[tuple[str, Mapping[str, Any]]]
    to_example: Callable[[str, Mapping[str, Any]], Example]
    renderer: Renderer
    max_prompt_length: int

    def examine(self, source: int, index: int) -> Examined:
        """Look at one row. A row with media is decoded and rendered as a run would; text is only tokenized."""
        row_id = f"{self.label}, row {index + 1}"
        try:
            row_id, row = self.rows[index]
        except DataError as error:
            return Examined(source, index, row_id, kind="unreadable", reason=str(error))
        try:
            example = self.to_example(row_id, row)
        except DataError as error:
            return Examined(source, index, row_id, kind=error.kind, reason=str(error))
        found = Examined(source, index, row_id, media=len(example.media), answer=example.answer)
        try:
            tokens = self.renderer.prompt_length(example)
            if example.media and tokens <= self.max_prompt_length:
                self.renderer.render(example)
            found = replace(found, tokens=tokens, digest=_digest(example))
        except DataError as error:
            return replace(found, kind="media" if example.media else "prompt", reason=str(error))
        if blank := _blank(example):
            return replace(found, kind="empty", reason=f"{row_id}: the {blank} is empty")
        if tokens > self.max_prompt_length:
            reason = f"{row_id}: the prompt has {tokens} tokens, max_prompt_length is {self.max_prompt_length}"
            return replace(found, kind="overlong", reason=reason)
        return found


def examine_all(
    open_examiners: Callable[[], Sequence[Examiner]], sizes: Sequence[int], *, workers: int
) -> Iterator[Examined]:
    """Yield what is found of every row, in order.

    Args:
        open_examiners: opens all sources, here (so that what it raises is said here) and once in each worker process,
            where it must be importable.
        sizes: the number of rows of each source.
        workers: processes; small sets are examined in this one. A row on which a process dies is reported, and the
            rest goes on.
    """
    examiners = open_examiners()
    if workers < 2 or sum(sizes) < _IN_PROCESS:
        for source, size in enumerate(sizes):
            yield from (examiners[source].examine(source, index) for index in range(size))
        return
    chunks = [
        (source, start, min(start + _CHUNK, size))
        for source, size in enumerate(sizes)
        for start in range(0, size, _CHUNK)
    ]
    while chunks:
        with ProcessPoolExecutor(workers, get_context("spawn"), _open, (open_examiners,)) as pool:
            futures: list[Future[list[Examined]]] = [pool.submit(_examine_chunk, *chunk) for chunk in chunks]
            done = 0
            try:
                for future in futures:
                    yield from future.result()
                    done += 1
            except BrokenProcessPool:
                source, start, stop = chunks[done]
        if done < len(chunks):
            yield from _examine_singly(open_examiners, examiners[source].label, source, range(start, stop))
            done += 1
        chunks = chunks[done:]


_examiners: Sequence[Examiner] = ()  # of a worker process


def _open(open_examiners: Callable[[], Sequence[Examiner]]) -> None:
    global _examiners
    _examiners = open_examiners()


def _examine_chunk(source: int, start: int, stop: int) -> list[Examined]:
    return [_examiners[source].examine(source, index) for index in range(start, stop)]


def _examine_singly(
    open_examiners: Callable[[], Sequence[Examiner]], label: str, source: int, rows: Sequence[int]
) -> Iterator[Examined]:
    """Find the row on which a worker dies: each that has killed one is named, and a new worker takes the next."""
    remaining = list(rows)
    while remaining:
        with ProcessPoolExecutor(1, get_context("spawn"), _open, (open_examiners,)) as pool:
            try:
                while remaining:
                    yield from pool.submit(_examine_chunk, source, remaining[0], remaining[0] + 1).result()
                    remaining.pop(0)
            except BrokenProcessPool:
                index = remaining.pop(0)
                row_id = f"{label}, row {index + 1}"
                yield Examined(source, index, row_id, kind="crash", reason=f"{row_id}: the worker process died on it")


def _blank(example: Example) -> str:
    """Which part of the row says nothing, "" if none does."""
    asked = any(
        message["content"].strip() if isinstance(message["content"], str) else True for message in example.messages
    )
    return "" if asked and example.answer.strip() else "answer" if asked else "prompt"


def _digest(example: Example) -> bytes:
    media = b"".join(map(digest_content, example.media))
    return hashlib.blake2b(repr(example.messages).encode() + media, digest_size=16).digest()
