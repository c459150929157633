"""Say which tokens stand for pictures, to models that attend over a picture's tokens in both directions."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from r1_rollout.tokens import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What models call the kinds of tokens: 0 text, 1 pictures, 2 videos.
NAMES = ("token_type_ids", "mm_token_type_ids")
_KEYS = (("image_token_id", 1), ("image_token_index", 1), ("video_token_id", 2), ("video_token_index", 2))


def hand_on_kinds(model: "PreTrainedModel") -> None:
    """Make a model's forward get the kinds of its tokens wherever it gets pixels.

    Models that find positions from the kinds (M-RoPE) get their positions instead.
    """
    taken = [name for name in NAMES if name in inspect.signature(model.forward).parameters]
    finds_positions = any(setting(part, "get_rope_index") for part in (model, setting(model, "model")))
    if not taken or finds_positions or not media_kinds(model.config) or setting(model, "hands_on_kinds"):
        return
    kinds = media_kinds(model.config)

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any] | None:
        token_ids = kwargs.get("input_ids")
        if token_ids is None or not any(name.startswith("pixel_values") for name in kwargs):
            return None
        return args, {taken[0]: find_kinds(token_ids, kinds), **kwargs}

    model.register_forward_pre_hook(add, with_kwargs=True)
    model.hands_on_kinds = True


def media_kinds(config: Any) -> dict[int, int]:
    """Return the kind of each token id that the configuration names as a placeholder of media."""
    found = {setting(config, key): kind for key, kind in _KEYS}
    return {token: kind for token, kind in found.items() if isinstance(token, int)}


def find_kinds(token_ids: Tensor, kinds: dict[int, int]) -> Tensor:
    """Return the kinds of token ids, int64 of the same shape."""
    found = torch.zeros_like(token_ids)
    for token, kind in kinds.items():
        found.masked_fill_(token_ids == token, kind)
    return found
