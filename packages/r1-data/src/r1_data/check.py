"""Inspect rows without a model: find everything that makes a row unusable, named by row."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from r1_data.lengths import MANY_TEXTS, KnownLengths
from r1_data.references import digest_content, fetched, is_pil, pictures
from r1_data.remarks import Remarks
from r1_data.render import Renderer
from r1_data.types import DataError, Example, MediaError, Overlong
from r1_data.vision import Pixels
from r1_data.workers import WorkerDied, Workers
from r1_data.workers.spread import map_examples

_MEDIA = 4  # pictures and videos in a chunk


@dataclass(frozen=True, slots=True)
class Examined:
    source: int  # which of the sources
    index: int  # of the row in its source, from 0
    id: str
    tokens: int | None = None  # of the prompt, media included; None if it cannot be rendered
    media: int = 0
    ground_truth: str | None = None
    digest: bytes = b""  # of messages and media
    # What is wrong, "" if nothing is: a `DataError.kind`, "unreadable", "prompt" (it cannot be rendered), "crash" (its
    # worker died), "damage" (media whose headers are sound do not decode), "overlong", or a remark.
    kind: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SourceRows:
    label: str  # for rows that cannot be read
    rows: Sequence[tuple[str, Mapping[str, object]]]
    reader: Callable[[str, Mapping[str, object]], Example]


class Inspection(NamedTuple):
    """A worker's result for one example; a tuple, because a million of them go through a pipe."""

    tokens: int | None  # None: the headers are broken
    digest: bytes = b""
    error: DataError | None = None


class Inspector:
    """Inspects examples as a run would. Media of overlong prompts are not decoded."""

    def __init__(self, renderer: Renderer, max_prompt_length: int) -> None:
        self.renderer, self.max_prompt_length = renderer, max_prompt_length

    def inspect(self, examples: Sequence[Example]) -> list[Inspection]:
        """Measure each example from its headers, then decode and resize its media."""
        fetched_examples = [_fetch(example) for example in examples]
        sound = [example for example in fetched_examples if isinstance(example, Example)]
        lengths = iter(self.renderer.measure(sound, self.max_prompt_length))
        return [
            Inspection(None, error=example)
            if isinstance(example, DataError)
            else self._load_media(example, next(lengths))
            for example in fetched_examples
        ]

    def load(self, example: Example) -> Pixels:
        return self.renderer.load(example)

    def _load_media(self, example: Example, tokens: int | DataError) -> Inspection:
        if isinstance(tokens, DataError):
            return Inspection(None, error=tokens)
        try:
            if example.media and tokens <= self.max_prompt_length:
                self.renderer.load(example)
            return Inspection(tokens, _digest(example))
        except DataError as error:
            return Inspection(tokens, error=error)


def examine_all(
    sources: Sequence[SourceRows],
    inspector: Inspector,
    workers: Workers | None = None,
    known: KnownLengths | None = None,
) -> Iterator[Examined]:
    """Yield the result of every row, in order.

    Workers, which hold the inspector, decode media. A row that kills its worker is reported. `known` caches the lengths
    of sound rows.
    """
    remarks = [Remarks(inspector.renderer.tokenizer, source.reader) for source in sources]
    many = sum(len(source.rows) for source in sources) >= MANY_TEXTS

    def look_up() -> Iterator[tuple[_Row, Example | None]]:
        for found, example in _read_all(sources):
            if example is None:
                yield _Row(found), None
                continue
            key, decoded_key = _keys(known, example)
            look = _read_known(decoded_key, known, example)
            if look is not None:
                key = decoded_key = None  # already cached
            yield (
                _Row(found, tuple(remarks[found.source].find(example)), key, decoded_key, look),
                None if look else example,
            )

    answered = map_examples(
        look_up(),
        workers,
        "inspect",
        inspector.inspect,
        is_local=lambda example: not (many or example.media),
        media=_MEDIA,
    )
    for row, answer in answered:
        yield _conclude(row, row.look or answer, inspector.max_prompt_length, known)


@dataclass(frozen=True, slots=True)
class _Row:
    found: Examined
    remarks: tuple[tuple[str, str], ...] = ()
    key: bytes | None = None  # of its length
    decoded_key: bytes | None = None  # of the fact that its media decode, too
    look: Inspection | None = None


def _read_all(sources: Sequence[SourceRows]) -> Iterator[tuple[Examined, Example | None]]:
    for number, source in enumerate(sources):
        for index in range(len(source.rows)):
            row_id = f"{source.label}, row {index + 1}"
            try:
                row_id, row = source.rows[index]
            except DataError as error:
                kind = error.kind if isinstance(error, Overlong) else "unreadable"
                yield Examined(number, index, row_id, kind=kind, reason=str(error)), None
                continue
            try:
                example = source.reader(row_id, row)
            except DataError as error:
                yield Examined(number, index, row_id, kind=error.kind, reason=str(error)), None
                continue
            yield Examined(number, index, row_id, media=len(example.media), ground_truth=example.ground_truth), example


def _keys(known: KnownLengths | None, example: Example) -> tuple[bytes | None, bytes | None]:
    key = known.key(example) if known else None
    if not example.media:
        return key, key
    # A picture in memory is cached by its size, which gives its tokens but not whether it decodes.
    sound = key and not any(map(is_pil, pictures(example.media)))
    return key, hashlib.blake2b(key + b"decoded", digest_size=16).digest() if key and sound else None


def _read_known(decoded_key: bytes | None, known: KnownLengths | None, example: Example) -> Inspection | None:
    tokens = known.get(decoded_key) if known and decoded_key else None
    try:
        return None if tokens is None else Inspection(tokens, _digest(example))
    except MediaError:  # deleted meanwhile
        return None


def _conclude(row: _Row, look: Inspection | WorkerDied | None, limit: int, known: KnownLengths | None) -> Examined:
    found = row.found
    if look is None:
        return found
    if isinstance(look, WorkerDied):
        return replace(found, kind="crash", reason=f"{found.id}: {look}")
    if look.tokens is not None and known and row.key:
        known.put(row.key, look.tokens)
        if look.error is None and look.tokens <= limit and row.decoded_key:
            known.put(row.decoded_key, look.tokens)
    kind, reason = _find_trouble(row, look, limit)
    # Not `replace`, which would take a tenth of the time of a text row.
    return Examined(
        found.source, found.index, found.id, look.tokens, found.media, found.ground_truth, look.digest, kind, reason
    )


def _find_trouble(row: _Row, look: Inspection, limit: int) -> tuple[str, str]:
    if look.error is not None:
        late = look.tokens is not None and isinstance(look.error, MediaError)
        return "damage" if late else "prompt" if look.error.kind == "row" else look.error.kind, str(look.error)
    assert look.tokens is not None
    if look.tokens > limit:
        return "overlong", f"{row.found.id}: the prompt has {look.tokens} tokens, max_prompt_length is {limit}"
    return row.remarks[0] if row.remarks else ("", "")


def _fetch(example: Example) -> Example | MediaError:
    try:
        return replace(example, media=tuple(map(fetched, example.media))) if example.media else example
    except MediaError as error:
        return MediaError(f"{example.id}: {error}")


def _digest(example: Example) -> bytes:
    try:
        media = b"".join(map(digest_content, example.media))
    except MediaError as error:
        raise MediaError(f"{example.id}: {error}") from error
    return hashlib.blake2b(repr(example.messages).encode() + media, digest_size=16).digest()
