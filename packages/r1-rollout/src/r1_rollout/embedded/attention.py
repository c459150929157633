"""The attention of models that the embedded engine owns: decoding by its cache, prefill by torch's attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from r1_rollout.embedded.kv import decoding_cache
from r1_rollout.embedded.scores import attend, read_score_change, retune
from r1_rollout.embedded.softmax import LOG2_E
from r1_rollout.embedded.windows import AttentionWindow, window_of

ATTENTION = "r1_rollout_decode"


class Continued(Protocol):
    """A prefill whose tokens follow prefixes."""

    places: Tensor  # int64 [prompts, tokens], of the tokens in their sequences

    def see(self, window: AttentionWindow | None) -> Tensor:
        """Return the mask of layers with a window, bool [prompts, 1, tokens, columns]."""

    def get_seq_length(self) -> int:
        """Return the tokens before, as the model counts them."""


_continued: ContextVar[Continued | None] = ContextVar("continued", default=None)


@contextmanager
def continuing(prefill: Continued) -> Iterator[None]:
    token = _continued.set(prefill)
    try:
        yield
    finally:
        _continued.reset(token)


def is_latent(module: nn.Module) -> bool:
    """Whether an attention caches latent keys and values (arXiv 2405.04434), which its `expand_kv` expands."""
    return hasattr(module, "expand_kv")


def decode_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with one query token per row to the row's prompt and answer; outside of decoding, use torch's attention.

    Query heads that share a key head (arXiv 2305.13245) are queries of it, so no key is copied.

    Args:
        query: [rows, heads, 1, size].
        key, value: [rows, key heads, 1, size], as `GroupCache.update` returned them for this layer or, if it shares
            the keys of an earlier one (Gemma 3n), for that; or expanded from these.

    Returns:
        [rows, 1, heads, size of a value], and no weights.

    Raises:
        RuntimeError: the model uses other keys, or a mask of its own.
        ValueError: it changes its scores in a way that is not known, see `read_score_change`.
    """
    cache, continued, window = decoding_cache(), _continued.get(), window_of(module, kwargs)
    if cache is None:
        if continued is not None:  # the model has one mask for all layers, and counts from the longest prefix
            attention_mask = attention_mask if window is None else continued.see(window)
            query = retune(module, query, lambda: continued.places, continued.get_seq_length())
        return attend(module, query, key, value, attention_mask, kwargs), None
    if not cache.enter(key, value, latent=is_latent(module)) or not cache.knows(attention_mask):
        raise RuntimeError(
            f"{type(module).__name__} does not attend to the keys as its cache gave them, or hides some by itself"
        )
    if window != cache.window:
        given = "to all tokens" if window is None else "within a window"
        known = "no window" if cache.window is None else "another window" if window is not None else "a window"
        raise RuntimeError(f"{type(module).__name__} attends {given}, its configuration has {known} for this layer")
    query = retune(module, query, cache.count_places, cache.get_seq_length())
    rows, heads, _, size = query.shape
    scaling = kwargs.get("scaling")
    scale = LOG2_E * (size**-0.5 if scaling is None else scaling)
    grouped = query.reshape(rows, key.shape[1], -1, size) * scale
    found = cache.attend(grouped, read_score_change(module, kwargs))
    return found.to(query.dtype).reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
