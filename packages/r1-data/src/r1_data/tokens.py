"""Tokenize many texts at once, without masks and offsets, or one with offsets."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from r1_data.types import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = 2**16  # characters of a long text that are tokenized first
_CUT = 512  # extra tokens of a word that is truncated at the end of a piece


def encode_all(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, as `tokenizer(text, add_special_tokens=False)` does.

    Calls the backend of a `tokenizers` tokenizer directly, in two thirds of the time. Raises TypeError, ValueError or
    OverflowError if an item is not text.
    """
    if not texts:
        return []
    if not is_plain(tokenizer):
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def encode_pieces(
    tokenizer: "PreTrainedTokenizerBase", text: str, cuts: Iterable[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenize a text so that no token extends over a cut, with the characters of each token.

    The text is tokenized whole unless a token extends over a cut; then the pieces between the cuts are tokenized apart.

    Args:
        cuts: characters of the text, in order.

    Raises:
        TypeError, ValueError, OverflowError: the text cannot be tokenized.
    """
    cuts = [cut for cut in cuts if 0 < cut < len(text)]
    if tokenizer.is_fast:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids, offsets = list(found["input_ids"]), list(found["offset_mapping"])
        if not any(start < cut < stop for cut, (start, stop) in _pair(cuts, offsets)):
            return token_ids, offsets
    token_ids, offsets = [], []
    for start, stop in pairwise([0, *cuts, len(text)]):
        piece = list(tokenizer(text[start:stop], add_special_tokens=False)["input_ids"])
        token_ids += piece
        offsets += [(start, stop)] * len(piece)
    return token_ids, offsets


def _pair(cuts: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each cut with the first token that ends behind it."""
    ends = [stop for _, stop in offsets]
    for cut in cuts:
        if (place := bisect_right(ends, cut)) < len(offsets):
            yield cut, offsets[place]


def count_beyond(tokenizer: "PreTrainedTokenizerBase", text: str, limit: int) -> int | None:
    """Return a number of tokens above `limit` that a long text certainly has; None if all of it must be tokenized.

    Tokenizes the beginning only, so that 200 MB of text cost as much as 64 KB, and more where the tokenizer makes one
    token of many characters (white space, unknown words).
    """
    size = max(_PIECE, 8 * limit)
    while size < len(text):
        (token_ids,) = encode_all(tokenizer, [text[:size]])
        if len(token_ids) - _CUT > limit:
            return len(token_ids) - _CUT
        size *= 4
    return None


def check_length(tokenizer: "PreTrainedTokenizerBase", text: str, limit: int | None, what: str, name: str) -> None:
    """Raise Overlong if a long text certainly exceeds `limit` tokens, which is the limit called `name`."""
    try:
        least = None if limit is None else count_beyond(tokenizer, text, limit)
    except (TypeError, ValueError, OverflowError):  # raised when all of it is tokenized
        return
    if least is not None:
        raise Overlong(f"{what} has {len(text):,} characters and at least {least:,} tokens, {name} is {limit}")


def is_plain(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer does nothing but call its backend of the `tokenizers` package."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(tokenizer)
    return (
        issubclass(own, PreTrainedTokenizerFast)
        and own._encode_plus is PreTrainedTokenizerFast._encode_plus
        and own.__call__ is PreTrainedTokenizerBase.__call__
        and not tokenizer.split_special_tokens
    )
