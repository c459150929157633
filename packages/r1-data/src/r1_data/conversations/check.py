"""Inspect fine-tuning rows: what makes one unusable, how much of it is trained, and whether another says the same."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from r1_data.demonstrations import ConversationRenderer
from r1_data.lengths import MANY_TEXTS
from r1_data.references import digest_content, fetched
from r1_data.types import Conversation, DataError, MediaError, Message
from r1_data.vision import Pixels
from r1_data.workers import WorkerDied, Workers
from r1_data.workers.spread import map_examples

_MEDIA = 4  # pictures and videos in a chunk


@dataclass(frozen=True, slots=True)
class ExaminedConversation:
    source: int  # which of the sources
    index: int  # of the row in its source, from 0
    id: str
    kind: str = ""  # of what is wrong, "" if nothing is: a `DataError.kind`, "unreadable", "prompt", "damage", "crash"
    reason: str = ""
    answers: int = 0  # messages of the assistant
    media: int = 0
    tokens: int = 0  # of the longest demonstration
    trained: int = 0  # tokens, of all its demonstrations
    hidden: int = 0  # answers whose reasoning the chat template leaves out
    prompt: bytes = b""  # digest of the messages before the last answer, and of the media
    whole: bytes = b""  # digest of all messages


class ConversationSource(NamedTuple):
    label: str  # for rows that cannot be read
    rows: Sequence[tuple[str, Mapping[str, object]]]
    reader: Callable[[str, Mapping[str, object]], Conversation]


class ConversationInspector:
    """Inspects conversations as a run would."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        self.renderer = renderer

    def inspect(self, conversations: Sequence[Conversation]) -> list[ExaminedConversation]:
        """Return the result of each, of which `source` and `index` are 0."""
        return [self._inspect(one) for one in conversations]

    def load(self, conversation: Conversation) -> Pixels:
        return self.renderer.load(conversation)

    def _inspect(self, one: Conversation) -> ExaminedConversation:
        try:
            found = self.renderer.survey(one)
        except DataError as error:
            kind = "prompt" if error.kind == "row" else error.kind
            return ExaminedConversation(0, 0, one.id, kind, str(error))
        try:
            media = b"".join(digest_content(fetched(reference)) for reference in one.media)
            if one.media:
                self.renderer.load(one)
        except MediaError as error:
            reason = str(error) if str(error).startswith(one.id) else f"{one.id}: {error}"
            return ExaminedConversation(0, 0, one.id, "damage", reason)
        return ExaminedConversation(
            0,
            0,
            one.id,
            answers=sum(message["role"] == "assistant" for message in one.messages),
            media=len(one.media),
            tokens=max(part.tokens for part in found),
            trained=sum(part.trained_tokens for part in found),
            hidden=max(part.hidden for part in found),
            prompt=_digest(one.messages[: _last_prompt(one)], media),
            whole=_digest([*one.messages, *(one.rejected or [])], media),
        )


def examine_conversations(
    sources: Sequence[ConversationSource], inspector: ConversationInspector, workers: Workers | None = None
) -> Iterator[ExaminedConversation]:
    """Yield the result of every row, in order.

    Workers, which hold the inspector, decode media. A row that kills its worker is reported.
    """
    many = sum(len(source.rows) for source in sources) >= MANY_TEXTS
    inspected = map_examples(
        _read_all(sources),
        workers,
        "inspect",
        inspector.inspect,
        is_local=lambda one: not (many or one.media),
        media=_MEDIA,
    )
    for row, found in inspected:
        if isinstance(found, WorkerDied):
            yield replace(row, kind="crash", reason=f"{row.id}: {found}")
        else:
            yield replace(found, source=row.source, index=row.index) if found else row


def _read_all(
    sources: Sequence[ConversationSource],
) -> Iterator[tuple[ExaminedConversation, Conversation | None]]:
    for number, source in enumerate(sources):
        for index in range(len(source.rows)):
            row_id, kind = f"{source.label}, row {index + 1}", "unreadable"
            try:
                row_id, row = source.rows[index]
                kind = ""
                yield ExaminedConversation(number, index, row_id), source.reader(row_id, row)
            except DataError as error:
                yield ExaminedConversation(number, index, row_id, kind or error.kind, str(error)), None


def _last_prompt(one: Conversation) -> int:
    if one.prompt_messages is not None:
        return one.prompt_messages
    return max(place for place, message in enumerate(one.messages) if message["role"] == "assistant")


def _digest(messages: Sequence[Message], media: bytes) -> bytes:
    """Hash the texts of messages, equal for texts that differ in case and white space only."""
    digest = hashlib.blake2b(media, digest_size=16)
    for message in messages:
        texts = [message["role"], *_texts(message["content"]), repr(message.get("tool_calls") or "")]
        digest.update(
            "\0".join(" ".join(text.casefold().split()) for text in texts).encode("utf-8", "backslashreplace")
        )
    return digest.digest()


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part.get("text", part["type"]) for part in content)
