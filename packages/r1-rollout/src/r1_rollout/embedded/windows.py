"""Which of the tokens before it a token sees: all, the last few (sliding windows), or those of its chunk."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from r1_rollout.tokens import setting

CHUNKED = "chunked_attention"
_SIZES = ("sliding_window", "attention_chunk_size")
Positions = TypeVar("Positions", Tensor, Any)


class AttentionWindow(NamedTuple):
    size: int  # tokens
    chunked: bool = False  # sequences are cut into chunks of `size`; else a token sees the last `size`, itself included

    def begin(self, positions: Positions) -> Positions:
        """Return the first token that each token sees; both are counted from the start of its sequence."""
        return positions // self.size * self.size if self.chunked else positions + 1 - self.size


def layer_windows(model: PreTrainedModel) -> tuple[AttentionWindow | None, ...]:
    """Return the window of each layer that has keys of its own, as transformers reads it; None: all tokens."""
    kinds, options = get_layer_types_and_kwargs(model.config.get_text_config())
    sizes = [each.get("sliding_window") for each in options]
    return tuple(size and AttentionWindow(size, kind == CHUNKED) for kind, size in zip(kinds, sizes, strict=True))


def window_of(module: nn.Module, options: Mapping[str, Any]) -> AttentionWindow | None:
    """Return the window of an attention, given the keywords of its call, which name sliding windows but not chunks."""
    if (size := options.get("sliding_window")) is not None:
        return AttentionWindow(size)
    kinds, layer = setting(setting(module, "config"), "layer_types"), setting(module, "layer_idx")
    if not kinds or layer is None or layer >= len(kinds) or kinds[layer] != CHUNKED:
        return None
    return AttentionWindow(module.config.attention_chunk_size, chunked=True)  # type: ignore[union-attr,arg-type]


@contextmanager
def narrowed(model: PreTrainedModel, most: int) -> Iterator[None]:
    """Let no layer's window be wider than `most`, in its configuration and in itself: then short texts go beyond it."""
    owners = [model.config.get_text_config(), *model.modules()]
    sizes = [(one, name, held) for one in owners for name in _SIZES if isinstance(held := setting(one, name), int)]
    try:
        for one, name, held in sizes:
            setattr(one, name, min(held, most))
        yield
    finally:
        for one, name, held in sizes:
            setattr(one, name, held)
