"""Write conversations with a chat template: contents in the form that it reads, and what it puts behind a turn."""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from r1_data.types import DataError, JsonObject, Message

if TYPE_CHECKING:
    from r1_data.render import Renderer

NONCE = secrets.token_hex(12)  # of this process, so that no text can spell a sentinel
SENTINEL = f"r1turn{NONCE}"
STAND_IN: tuple[Message, ...] = ({"role": "user", "content": "Question?"},)  # in the place of the history
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"


class Writer:
    """Writes messages with a renderer's chat template.

    With `content_parts`, texts are given as parts. A content that is a list of text parts only is given as a string.
    """

    def __init__(self, renderer: "Renderer", *, content_parts: bool = False) -> None:
        self.renderer, self.content_parts = renderer, content_parts

    def write(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        generation_prompt: bool = True,
        template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Call `Renderer.write_chat`. Raises DataError if the template refuses the messages."""
        if self.content_parts:
            messages = [_with_parts(message) for message in messages]
        return self.renderer.write_chat(
            messages,
            tools=tools,
            generation_prompt=generation_prompt,
            template=template,
            template_kwargs=template_kwargs,
        )

    def behind_turn(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[Message] = STAND_IN,
        content: str = SENTINEL,
        tools: Sequence[JsonObject] = (),
    ) -> str:
        """Return the text from the end of a turn to where the policy's next one begins.

        Args:
            messages: what follows the turn.
            before: what precedes it.
            content: of the turn; ends with the sentinel.

        Raises:
            DataError: the template does not write the turn's content.
        """
        whole = self.write([*before, {"role": "assistant", "content": content}, *messages], tools=tools)
        _, found, behind = whole.partition(SENTINEL)
        if not found:
            raise DataError("the chat template does not write the content of an assistant's message")
        return behind

    def behind_calls(
        self,
        messages: Sequence[Message],
        *,
        before: Sequence[Message] = STAND_IN,
        tools: Sequence[JsonObject] = (),
    ) -> str:
        """Return the text between calls and the policy's next turn, the difference of two renderings.

        Raises DataError if the template changes the calls when results follow.
        """
        results = [message for message in messages if message["role"] == "tool"]
        ids = [result.get("tool_call_id") or f"call{index:05d}" for index, result in enumerate(results)]
        calls = [make_call(result.get("name") or "tool", {}, id_) for id_, result in zip(ids, results, strict=True)]
        turn = [*before, {"role": "assistant", "content": "", "tool_calls": calls}]
        known = iter(ids)
        answers = [{**one, "tool_call_id": next(known)} if one["role"] == "tool" else one for one in messages]
        whole = self.write([*turn, *answers], tools=tools)
        called = self.write(turn, tools=tools, generation_prompt=False)
        if not whole.startswith(called):
            raise DataError("the chat template changes a call when its result follows")
        return whole[len(called) :]


def needs_parts(renderer: "Renderer") -> bool:
    """Whether the template shows a text only if it is given as a part."""
    for content_parts in (False, True):
        writer = Writer(renderer, content_parts=content_parts)
        with contextlib.suppress(DataError):
            if SENTINEL in writer.write([{"role": "user", "content": SENTINEL}]):
                return content_parts
    return False


def make_call(name: str, arguments: "JsonObject | str", id_: str) -> JsonObject:
    return {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}


def as_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Write tool results into user messages, in <tool_response>; join neighbours, as some templates take one a turn."""
    parts: list[JsonObject] = []
    for message in messages:
        items = _as_parts(message["content"])
        if message["role"] == "tool":
            items = [_text_part(f"{RESPONSE}\n"), *items, _text_part(f"\n{RESPONSE_END}")]
        parts += [_text_part("\n"), *items] if parts else items
    return [{"role": "user", "content": join_texts(parts)}]


def append_content(messages: Sequence[Message], contents: "Sequence[str | list[JsonObject]]") -> list[Message]:
    """Append contents to the last user message; without one they are a user message at the end."""
    parts = [part for content in contents for part in _as_parts(content)]
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "user"), None)
    if last is None:
        return [*messages, {"role": "user", "content": join_texts(parts)}]
    before = messages[last]["content"]
    joined = join_texts([*_as_parts(before), *parts])
    content = [_text_part(joined)] if isinstance(joined, str) and not isinstance(before, str) else joined
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]


def join_texts(parts: Sequence[JsonObject]) -> "str | list[JsonObject]":
    """Return text parts only as one string, others as they are, with neighbouring texts joined."""
    joined: list[JsonObject] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = _text_part(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    if not joined:
        return ""
    return str(joined[0]["text"]) if len(joined) == 1 and joined[0]["type"] == "text" else joined


def _as_parts(content: "str | Sequence[JsonObject]") -> list[JsonObject]:
    return [_text_part(content)] if isinstance(content, str) else list(content)


def _text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _with_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [_text_part(content)]} if isinstance(content, str) else message
