"""Insert marks, which are words that no text has, into messages and chat templates, and read where they stand."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from r1_data.turns.conversation import NONCE
from r1_data.types import Message

# A mark is its kind, the number of its message, and the process's random word.
IN_TEXT, IN_CALL, IN_REASONING = "m", "c", "r"  # in a message's text; in its last call; behind its reasoning
PLAIN, PLAIN_END = "p", "q"  # around text that spells a special token
TAG, TAG_END = "g", "h"  # in the place of {% generation %} and {% endgeneration %}
_MARK = re.compile(rf"r1([mcrpqgh]){NONCE}x(\d+)z")
_TAGS = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_THOUGHT_END = "</think>"
_ORDER = (PLAIN_END, IN_REASONING, IN_TEXT, PLAIN)  # of marks at one place
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Marks:
    text: str  # without the marks
    places: tuple[tuple[str, int, int], ...]  # (kind, number, character of `text`), in order

    def last(self, number: int) -> int | None:
        """Return where the last mark of a message stands; tool results may repeat a call's, so its first counts."""
        calls = self.all(IN_CALL, number)
        found = calls[:1] or sorted(self.all(IN_TEXT, number) + self.all(IN_REASONING, number))
        return found[-1] if found else None

    def all(self, kind: str, number: int) -> list[int]:
        return [place for found, own, place in self.places if (found, own) == (kind, number)]

    def between(self, start: str, stop: str) -> list[tuple[int, int]]:
        """Return the ranges between marks of two kinds."""
        places = ([place for kind, _, place in self.places if kind == wanted] for wanted in (start, stop))
        return list(zip(*places, strict=False))


def read_marks(rendered: str) -> Marks:
    text, places, start = "", [], 0
    for found in _MARK.finditer(rendered):
        text += rendered[start : found.start()]
        places.append((found[1], int(found[2]), len(text)))
        start = found.end()
    return Marks(text + rendered[start:], tuple(places))


def _mark(kind: str, number: int) -> str:
    return f"r1{kind}{NONCE}x{number}z"


@cache
def mark_tags(template: str) -> str | None:
    """Return a template that writes marks in the place of its tags; None if it has none.

    The tags' rules of white space stay: `{%- if` and `endif %}` have the same.
    """

    def written(found: "re.Match[str]") -> str:
        mark = _mark(TAG_END if found[2] else TAG, 0)
        return f"{{%{found[1]} if true %}}{{{{ '{mark}' }}}}{{% endif {found[3]}%}}"

    marked, count = _TAGS.subn(written, template)
    return marked if count else None


def mark_message(message: Message, number: int, special: "re.Pattern[str]", everywhere: bool) -> Message:
    """Insert marks: behind an answer, its reasoning and its last call; in the middle of other texts."""
    assistant = message["role"] == "assistant"
    guard = partial(_guard, special=special, number=number)

    def mark(text: str) -> str:
        if not text.strip() or not (assistant or everywhere):
            return guard(text)
        if not assistant:
            return guard(text, {len(text) // 2: IN_TEXT})
        marks = {len(text.rstrip()): IN_TEXT}
        if thought := text.partition(_THOUGHT_END)[0].rstrip() if _THOUGHT_END in text else "":
            marks[len(thought)] = IN_REASONING
        return guard(text, marks)

    changed = dict(message)
    for name in _REASONING:
        if isinstance(text := message.get(name), str):
            changed[name] = guard(text, {len(text.rstrip()): IN_REASONING} if text.strip() else {})
    calls = message.get("tool_calls") if assistant else None
    if calls:
        *others, last = [map_texts(call, guard) for call in calls]
        function = last.get("function", last)
        named = {**function, "name": f"{function.get('name', '')}{_mark(IN_CALL, number)}"}
        changed["tool_calls"] = [*others, {**last, "function": named} if "function" in last else named]
    content = message.get("content")
    if isinstance(content, str):
        changed["content"] = mark(content)
    elif isinstance(content, list):
        texts = [index for index, part in enumerate(content) if part.get("type") == "text"]
        changed["content"] = [
            {**part, "text": (mark if index == texts[-1] else guard)(part["text"])} if index in texts else part
            for index, part in enumerate(content)
        ]
    return changed


def _guard(
    text: str, marks: Mapping[int, str] = MappingProxyType({}), *, special: "re.Pattern[str]", number: int
) -> str:
    """Insert marks around special tokens that the text spells, and further ones (character -> kind) outside them."""
    inserted = [(place, kind) for place, kind in marks.items()]
    for found in special.finditer(text):
        inserted = [(found.end() if found.start() < place < found.end() else place, kind) for place, kind in inserted]
        inserted += [(found.start(), PLAIN), (found.end(), PLAIN_END)]
    pieces, start = [], 0
    for place, kind in sorted(inserted, key=lambda one: (one[0], _ORDER.index(one[1]))):
        pieces += [text[start:place], _mark(kind, number)]
        start = place
    return "".join([*pieces, text[start:]])


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {key: map_texts(item, change) for key, item in value.items()}
        case list() | tuple():
            return [map_texts(item, change) for item in value]
    return value


def has_reasoning(message: Message) -> bool:
    content = message.get("content")
    inside = isinstance(content, str) and _THOUGHT_END in content and content.partition(_THOUGHT_END)[0]
    thought = "".join(str(message.get(name) or "") for name in _REASONING) + (inside or "")
    return bool(thought.replace("<think>", "").strip())
