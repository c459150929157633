"""What is odd about a row that can be used all the same: a run takes it, and says so."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from r1_data.messages import is_visible
from r1_data.types import Example

_PLURALS = {"image": "images", "video": "videos"}
_PREFIX = 4  # characters
_OPENING = tuple("<[{|>")  # first characters of control tokens that are not marked as special
_HTML = re.compile(
    "</?(a|b|blockquote|br|caption|code|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|span|strong|sub|sup|u|ul"
    "|table|tbody|td|tfoot|th|thead|tr)>"
)


class Remarks:
    """Looks at the examples of one source for what their author may not have meant."""

    def __init__(self, tokenizer: Any, reader: Callable[..., Example]) -> None:
        """Take the control tokens from `tokenizer`.

        Tokens that the reader's `format_prompt` and `system_prompt` spell, such as `<think>`, are the user's own: they
        are no remark, as often as they stand there.
        """
        self._control = _one_of(control_tokens(tokenizer))
        own = [getattr(reader, name, None) or "" for name in ("format_prompt", "system_prompt")]
        self._own = Counter(self._control.findall("\n".join(own)) if self._control else ())

    def of(self, example: Example) -> Iterator[tuple[str, str]]:
        """Yield (kind, what is said) for each oddity of an example."""
        if not is_visible(example.ground_truth):
            yield "blank answer", f"{example.id}: the answer is empty"
        if spelled := next(self._spelled(example), None):
            yield "markup", f"{example.id}: the row's text spells {spelled}, which the model reads as a control token"
        for one, many in _PLURALS.items():
            cell = example.metadata.get(one)
            if cell is not None and cell not in ("", []) and many not in example.metadata:
                yield "unread", f"{example.id}: column {one!r} is not read, because there is {many!r}, too"

    def _spelled(self, example: Example) -> Iterator[str]:
        """Yield the control tokens in the messages, without those of the user's own prompts."""
        if self._control is None:
            return
        own = self._own.copy()
        for text in _texts(example.messages):
            for token in self._control.findall(text):
                own[token] -= 1
                if own[token] < 0:
                    yield token


def control_tokens(tokenizer: Any) -> set[str]:
    """Return the tokens with which a model structures its conversations, such as `<|im_end|>` and `<tool_call>`.

    These are the special tokens, and every other token that was added to the vocabulary in brackets or bars. HTML tags
    are text, although some vocabularies add them.
    """
    words = {*getattr(tokenizer, "all_special_tokens", [])}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if token.special or (token.content[:1] in _OPENING and not _HTML.fullmatch(token.content)):
            words.add(token.content)
    return {word for word in words if len(word.strip()) > 1}


def _one_of(words: set[str]) -> "re.Pattern[str] | None":
    """Compile a pattern that finds any of the words, the longest first.

    Words are grouped by their first characters: some vocabularies have a thousand control tokens, and a pattern of a
    thousand alternatives would be slow on every `<` of a text.
    """
    if not words:
        return None
    groups: dict[str, list[str]] = {}
    for word in sorted(words, key=len, reverse=True):
        groups.setdefault(word[:_PREFIX], []).append(word[_PREFIX:])
    tails = {head: "|".join(map(re.escape, tails)) for head, tails in groups.items()}
    return re.compile("|".join(f"{re.escape(head)}(?:{tail})" for head, tail in tails.items()))


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in messages, names of fields included: a chat template may write any of them."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(name)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
    else:
        yield str(value)
