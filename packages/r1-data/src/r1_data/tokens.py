"""The token ids of many texts at once, without what the tokenizer would tell beside them."""

from collections.abc import Sequence
from typing import Any


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
