"""The token ids of many texts at once, without what the tokenizer would tell beside them."""

from collections.abc import Sequence
from typing import Any

_PIECE = 2**16  # characters that are tokenized of a longer text at first
_CUT = 512  # tokens that the last, cut-off word of a piece may have beside those that it has in the whole text


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text: what `tokenizer(text, add_special_tokens=False)` gives.

    A tokenizer of the library `tokenizers` is asked itself, in two thirds of the time: masks, types and the places of
    tokens in the text are left out. Raises TypeError, ValueError or OverflowError for what is no text.
    """
    if not texts:
        return []
    if not _is_plain(tokenizer):
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def count_beyond(tokenizer: Any, text: str, limit: int) -> int | None:
    """Return a number of tokens above `limit` that a long text certainly has; None if all of it must be tokenized.

    Only the beginning of the text is tokenized, so that 200 MB of it cost as much as 64 KB. A tokenizer that makes one
    token of many characters (white space, unknown words) is given more, until the limit is reached or the text ends.
    """
    size = max(_PIECE, 8 * limit)
    while size < len(text):
        (token_ids,) = encode_all(tokenizer, [text[:size]])
        if len(token_ids) - _CUT > limit:
            return len(token_ids) - _CUT
        size *= 4
    return None


def _is_plain(tokenizer: Any) -> bool:
    """Whether nothing stands between a tokenizer and its backend: some families write a text anew first."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = type(tokenizer)
    return (
        issubclass(own, PreTrainedTokenizerFast)
        and own._encode_plus is PreTrainedTokenizerFast._encode_plus
        and own.__call__ is PreTrainedTokenizerBase.__call__
        and not tokenizer.split_special_tokens
    )
