"""Find oddities of usable rows, which a run logs."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from r1_data.cells import is_visible
from r1_data.messages import RowReader
from r1_data.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLURALS = {"image": "images", "video": "videos"}
_PREFIX = 4  # characters
_OPENING = tuple("<[{|>")  # first characters of control tokens that are not special
_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|u|ul"
    "|table|tbody|td|tfoot|th|thead|tr)>"
)


class Remarks:
    """Checks the examples of one source for oddities."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", reader: Callable[..., Example]) -> None:
        """`tokenizer` gives the control tokens. Those in the reader's own prompts, such as `<think>`, are intended."""
        self._control = _one_of(control_tokens(tokenizer))
        own = [reader.format_prompt or "", reader.system_prompt or ""] if isinstance(reader, RowReader) else []
        self._own = Counter(self._control.findall("\n".join(own)) if self._control else ())

    def find(self, example: Example) -> Iterator[tuple[str, str]]:
        if not is_visible(example.ground_truth):
            yield "blank answer", f"{example.id}: the answer is empty"
        if spelled := self._spelled(example):
            yield "markup", f"{example.id}: the row's text spells {spelled}, which the model reads as a control token"
        for one, many in _PLURALS.items():
            cell = example.metadata.get(one)
            if cell is not None and cell not in ("", []) and many not in example.metadata:
                yield "unread", f"{example.id}: column {one!r} is not read, because there is {many!r}, too"

    def _spelled(self, example: Example) -> str | None:
        found = self._control.findall("\n".join(_texts(example.messages))) if self._control else ()
        if not found:
            return None
        own = self._own.copy()
        for token in found:
            own[token] -= 1
            if own[token] < 0:
                return str(token)
        return None


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the tokens that structure the model's conversations, such as `<|im_end|>` and `<tool_call>`.

    These are the special tokens, and every other added token in brackets or bars. HTML tags are text, although some
    vocabularies add them.
    """
    words = {*tokenizer.all_special_tokens}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (token.content[:1] in _OPENING and not _HTML.fullmatch(token.content)):
            words.add(token.content)
    return {word for word in words if len(word.strip()) > 1}


def _one_of(words: set[str]) -> "re.Pattern[str] | None":
    """Compile a pattern of words, longest first, grouped by first characters: a thousand alternatives would be slow."""
    if not words:
        return None
    groups: dict[str, list[str]] = {}
    for word in sorted(words, key=len, reverse=True):
        groups.setdefault(word[:_PREFIX], []).append(word[_PREFIX:])
    tails = {head: "|".join(map(re.escape, tails)) for head, tails in groups.items()}
    return re.compile("|".join(f"{re.escape(head)}(?:{tail})" for head, tail in tails.items()))


def _texts(messages: object) -> Iterator[str]:
    """Yield every text in messages, field names included: a chat template may write any of them."""
    waiting = [messages]  # a stack: a row may nest deeper than Python recurses
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list | tuple):
            waiting += reversed(value)
        elif isinstance(value, Mapping):
            waiting += [part for pair in reversed([*value.items()]) for part in reversed(pair)]
        else:
            yield str(value)
