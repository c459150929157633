"""What is odd about a row that can be used all the same: a run takes it, and says so."""

import re
from collections.abc import Iterator
from typing import Any

from r1_data.messages import is_visible
from r1_data.types import Example

_PLURALS = {"image": "images", "video": "videos"}


class Remarks:
    """Looks at examples for what their author may not have meant."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` knows which words are control tokens."""
        special = [word for word in getattr(tokenizer, "all_special_tokens", []) if len(word) > 1]
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def of(self, example: Example) -> Iterator[tuple[str, str]]:
        """Yield (kind, what is said) for each oddity of an example."""
        if not is_visible(example.ground_truth):
            yield "blank answer", f"{example.id}: the answer is empty"
        for text in _texts(example):
            if self._special and (found := self._special.search(text)):
                reason = f"{example.id}: the row's text spells {found[0]}, which the model reads as a control token"
                yield "markup", reason
                break
        for one, many in _PLURALS.items():
            cell = example.metadata.get(one)
            if cell is not None and cell not in ("", []) and many not in example.metadata:
                yield "unread", f"{example.id}: column {one!r} is not read, because there is {many!r}, too"


def _texts(example: Example) -> Iterator[str]:
    for message in example.messages:
        content = message["content"]
        if isinstance(content, str):
            yield content
        else:
            yield from (item["text"] for item in content if "text" in item)
