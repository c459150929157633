"""Tokenize what an environment says, so that none of its text becomes a control token."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from r1_data.tokens import encode_all, is_plain
from r1_data.turns.conversation import NONCE, RESPONSE, RESPONSE_END
from r1_data.types import DataError, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Write = Callable[[Sequence[Message]], str]  # renders messages with what stands around them

_START, _END = f"r1start{NONCE}", f"r1end{NONCE}"
_MARKED = re.compile(f"({_START}.*?{_END})", re.DOTALL)
_TAG = re.compile(r"[<\[].*[>\]]", re.DOTALL)  # a token that is a tag, e.g. "</think>", but not "  "
_MOST_SHAPES = 1000
_GUARDED = ("system", "tool", "user")  # roles whose texts are tokenized apart if they spell a control token


class SafeEncoder:
    """Tokenizes rendered messages in one go, as a server would, unless a text in them spells a control token.

    Control tokens are the tokenizer's special tokens (placeholders of pictures among them), its other added tokens that
    are tags, such as `</tool_response>`, and this process's sentinels. A message whose text spells one is tokenized
    apart, so that the text stays as it is and its tokens are those of plain characters.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        tokens = {id_: token for id_, token in added.items() if token.special or _TAG.fullmatch(token.content)}
        self.control_ids = frozenset(tokens)
        # The tokenizer splits special tokens (`split_special_tokens`); others are cut behind their first character.
        tags = {token.content for token in tokens.values() if not token.special} | {RESPONSE, RESPONSE_END}
        spelled = {token.content for token in tokens.values()} | tags | {NONCE}
        self._spelled, self._tags = any_of(spelled), any_of(tags)
        self._special = any_of({token.content for token in tokens.values() if token.special})
        self._splitting: Tokenizer | None = None
        self._shapes: dict[object, int] = {}

    def encode(self, write: Write, messages: Sequence[Message], *, cached: bool = True) -> tuple[str, list[int]]:
        """Return the text and tokens of `write(messages)`.

        Args:
            messages: with contents that are a string, or parts of type text and image.
            cached: `write` adds the same control tokens to all messages of one shape (roles, names, kinds of parts).

        Raises:
            DataError: the template refuses the messages, or cuts a text in pieces.
        """
        text = write(messages)
        (token_ids,) = encode_all(self.tokenizer, [text])
        spelling = [self._spelled.search("".join(_texts(message))) is not None for message in messages]
        if not any(spelling):
            if self._count(token_ids) == self._expected(write, messages, cached):
                return text, token_ids
            spelling = [True] * len(messages)  # spelled by two texts together, or by what a normalizer makes of one
        marked = [map_texts(one, _mark) if spells else one for one, spells in zip(messages, spelling, strict=True)]
        return self._encode_apart(write(marked))

    def _encode_apart(self, marked: str) -> tuple[str, list[int]]:
        text, token_ids = "", list[int]()
        for index, piece in enumerate(_MARKED.split(marked)):
            if index % 2:
                piece = piece[len(_START) : -len(_END)]
                token_ids += self.encode_plain(piece)
            elif NONCE in piece:
                raise DataError("the chat template cuts the text of a message in pieces; give another template")
            else:
                token_ids += encode_all(self.tokenizer, [piece])[0] if piece else []
            text += piece
        return text, token_ids

    def without_special(self, text: str) -> str:
        """Leave out the special tokens that a text spells, those too that its pieces then spell together."""
        while (shorter := self._special.sub("", text)) != text:
            text = shorter
        return text

    def encode_plain(self, text: str) -> list[int]:
        """Tokenize a text so that no token of it is a control token, whatever it spells."""
        token_ids = [token for piece in _cut(text, self._tags) for token in self._split(piece)]
        if self.control_ids.isdisjoint(token_ids):
            return token_ids
        # A normalizer of the tokenizer spells a control token out of other characters.
        single = [token for letter in text for token in self._split(letter)]
        return [token for token in single if token not in self.control_ids]

    def _split(self, text: str) -> list[int]:
        if not is_plain(self.tokenizer):
            return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        if self._splitting is None:  # a copy: what splits special tokens is a flag of the tokenizer, for all threads
            self._splitting = copy.deepcopy(self.tokenizer.backend_tokenizer)
            self._splitting.no_truncation()
            self._splitting.no_padding()
            self._splitting.encode_special_tokens = True
        return list(self._splitting.encode(text, add_special_tokens=False).ids)

    def _count(self, token_ids: Sequence[int]) -> int:
        return sum(map(self.control_ids.__contains__, token_ids))

    def _expected(self, write: Write, messages: Sequence[Message], cached: bool) -> int:
        """Return how many control tokens the template adds, counted around marks in the place of all texts."""
        shape = tuple(map(_shape, messages)) if cached else None
        if shape is None or (found := self._shapes.get(shape)) is None:
            (token_ids,) = encode_all(self.tokenizer, [write([map_texts(message, _to_mark) for message in messages])])
            found = self._count(token_ids)
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            if shape is not None:
                self._shapes[shape] = found
        return found


def map_texts(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with every text changed; an assistant's as it is."""
    content = message["content"]
    if message["role"] not in _GUARDED:
        return message
    if isinstance(content, str):
        return {**message, "content": change(content)}
    parts = [{**part, "text": change(part["text"])} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}


def _texts(message: Message) -> list[str]:
    content = message["content"]
    if message["role"] not in _GUARDED:
        return []
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _shape(message: Message) -> object:
    content = message["content"]
    if isinstance(content, str):
        return message["role"], message.get("name"), bool(content.strip())
    kinds = tuple(part["type"] if part["type"] != "text" else bool(part["text"].strip()) for part in content)
    return message["role"], message.get("name"), kinds


def _mark(text: str) -> str:
    return f"{_START}{text}{_END}" if text else text


def _to_mark(text: str) -> str:
    return _START if text.strip() else text


def any_of(texts: "set[str]") -> "re.Pattern[str]":
    """Match any of some texts, longer ones first; grouped by their first two letters, as there may be thousands."""
    if not texts:
        return re.compile("(?!)")  # matches nothing
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=len, reverse=True):
        groups.setdefault(text[:2], []).append(re.escape(text[2:]))
    return re.compile("|".join(f"{re.escape(start)}(?:{'|'.join(ends)})" for start, ends in groups.items()))


def _cut(text: str, tags: "re.Pattern[str]") -> list[str]:
    """Cut a text behind the first character of every tag in it, of overlapping ones, too."""
    pieces, start, position = [], 0, 0
    while (found := tags.search(text, position)) is not None:
        position = found.start() + 1
        pieces.append(text[start:position])
        start = position
    return [*pieces, text[start:]]
