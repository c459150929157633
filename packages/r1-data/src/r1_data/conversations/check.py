"""Inspect fine-tuning rows: what makes one unusable, how much of it is trained, and whether another says the same."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from r1_data.demonstrations import ConversationRenderer
from r1_data.references import digest_content, fetched
from r1_data.types import Conversation, DataError, MediaError, Message


@dataclass(frozen=True, slots=True)
class ExaminedConversation:
    source: int  # which of the sources
    index: int  # of the row in its source, from 0
    id: str
    kind: str = ""  # of what is wrong, "" if nothing is: a `DataError.kind`, "unreadable", "prompt", "damage"
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


def examine_conversations(
    sources: Sequence[ConversationSource], renderer: ConversationRenderer
) -> Iterator[ExaminedConversation]:
    """Yield the result of every row, in order. Media are decoded."""
    for number, source in enumerate(sources):
        for index in range(len(source.rows)):
            row_id = f"{source.label}, row {index + 1}"
            try:
                row_id, row = source.rows[index]
            except DataError as error:
                yield ExaminedConversation(number, index, row_id, "unreadable", str(error))
                continue
            try:
                one = source.reader(row_id, row)
            except DataError as error:
                yield ExaminedConversation(number, index, row_id, error.kind, str(error))
                continue
            yield _examine(number, index, one, renderer)


def _examine(number: int, index: int, one: Conversation, renderer: ConversationRenderer) -> ExaminedConversation:
    try:
        found = renderer.survey(one)
    except DataError as error:
        kind = "prompt" if error.kind == "row" else error.kind
        return ExaminedConversation(number, index, one.id, kind, str(error))
    try:
        media = b"".join(digest_content(fetched(reference)) for reference in one.media)
        if one.media:
            renderer.load(one)
    except MediaError as error:
        reason = str(error) if str(error).startswith(one.id) else f"{one.id}: {error}"
        return ExaminedConversation(number, index, one.id, "damage", reason)
    return ExaminedConversation(
        number,
        index,
        one.id,
        answers=sum(message["role"] == "assistant" for message in one.messages),
        media=len(one.media),
        tokens=max(part.tokens for part in found),
        trained=sum(part.trained_tokens for part in found),
        hidden=max(part.hidden for part in found),
        prompt=_digest(one.messages[: _last_prompt(one)], media),
        whole=_digest([*one.messages, *(one.rejected or [])], media),
    )


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
