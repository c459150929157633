"""Fingerprints of rows: their questions' words, and their pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from r1_data.check import SourceRows
from r1_data.overlap.picture_hashes import PicturePrint, print_picture
from r1_data.overlap.shares import RUN, TextPrint, print_text
from r1_data.references import digest_content, pictures
from r1_data.types import Conversation, DataError, Example, MediaError
from r1_data.workers import WorkerDied, Workers
from r1_data.workers.spread import map_examples

_MANY = 20_000  # rows; of fewer, this process reads the texts


class Content(NamedTuple):
    """What a row is compared by."""

    text: TextPrint | None  # None: its few words tell it from no other row with a picture
    pictures: tuple[PicturePrint, ...] = ()  # without those of one colour
    problem: str = ""  # why pictures are missing


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A row for comparison."""

    source: int  # which of the sources
    index: int  # of the row in its source, from 0
    id: str
    content: Content | None  # None: the row cannot be read
    problem: str = ""  # why the row, or a picture of it, was not compared


class Fingerprinter:
    """Computes what rows are compared by. It pickles, for worker processes."""

    def __init__(self, *, decode: bool = True) -> None:
        """Without `decode`, pictures are compared as they are stored: a short row equals others by text and media."""
        self.decode = decode

    def fingerprint(self, examples: Sequence[Example | Conversation]) -> list[Content]:
        return [self._content(example) for example in examples]

    def _content(self, example: Example | Conversation) -> Content:
        text = print_text(shown_text(example))
        if not example.media:
            return Content(text)
        kept = text if text.words >= RUN else None
        try:
            if not self.decode:
                encoded = [int.from_bytes(digest_content(one)[:7]) for one in example.media]
                return Content(text._replace(whole=hash((text.whole, *encoded))))
            found = map(print_picture, pictures(example.media))
            return Content(kept, tuple(one for one in found if one is not None))
        except MediaError as error:
            return Content(kept, problem=f"{example.id}: {error}")


def shown_text(example: Example | Conversation) -> str:
    """Return the user's messages, without media; of a row without them, all but the system's."""
    asked = [one for one in example.messages if one["role"] == "user"]
    asked = asked or [one for one in example.messages if one["role"] != "system"]
    return "\n".join(_text(one["content"]) for one in asked)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(item["text"] for item in content if "text" in item)


def fingerprint_rows(
    sources: Sequence[SourceRows],
    fingerprinter: Fingerprinter,
    workers: Workers | None = None,
    rows: Sequence[tuple[int, int]] | None = None,
) -> Iterator[Fingerprint]:
    """Yield the fingerprint of every row of several sources, in order.

    Args:
        workers: hold the fingerprinter; they decode pictures.
        rows: source and index of each row to read; None: all.
    """
    many = (sum(len(one.rows) for one in sources) if rows is None else len(rows)) >= _MANY
    answered = map_examples(
        (_read(sources[number], number, index) for number, index in (_every_row(sources) if rows is None else rows)),
        workers,
        "fingerprint",
        fingerprinter.fingerprint,
        is_local=lambda example: not (many or example.media),
    )
    for row, content in answered:
        if isinstance(content, WorkerDied):
            yield Fingerprint(row.source, row.index, row.id, None, f"{row.id}: {content}")
        elif content is None:
            yield row
        else:
            yield Fingerprint(row.source, row.index, row.id, content, content.problem)


def _every_row(sources: Sequence[SourceRows]) -> Iterator[tuple[int, int]]:
    yield from ((number, index) for number, one in enumerate(sources) for index in range(len(one.rows)))


def _read(source: SourceRows, number: int, index: int) -> tuple[Fingerprint, Example | None]:
    row_id = f"{source.label}, row {index + 1}"
    try:
        row_id, row = source.rows[index]
        return Fingerprint(number, index, row_id, None), source.reader(row_id, row)
    except DataError as error:
        return Fingerprint(number, index, row_id, None, str(error)), None
