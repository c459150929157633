"""Tokenize many texts at once, without masks and offsets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
