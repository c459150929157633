"""Give a model's forward its pictures as it needs them: in its own precision, with the kinds of the tokens."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from r1_rollout.tokens import setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What models call the kinds of tokens: 0 text, 1 pictures, 2 videos.
NAMES = ("token_type_ids", "mm_token_type_ids")
_TEXT_INPUTS = ("attention_mask", "inputs_embeds")  # that may be floating-point, too
_KEYS = (("image_token_id", 1), ("image_token_index", 1), ("video_token_id", 2), ("video_token_index", 2))


def prepare_media(model: "PreTrainedModel") -> None:
    """Cast the inputs of pictures to the model's dtype, and hand on the kinds of tokens.

    Processors return float32, and not every vision tower casts it to the dtype of its weights.
    """
    if not media_kinds(model.config) or setting(model, "casts_media"):
        return
    model.register_forward_pre_hook(cast_media, with_kwargs=True)
    model.casts_media = True
    hand_on_kinds(model)


def cast_media(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Hook of a model's forward: cast floating-point inputs, but those of text, to the dtype of its embeddings."""
    dtype = module.get_input_embeddings().weight.dtype
    media = {
        name: value.to(dtype)
        for name, value in kwargs.items()
        if name not in _TEXT_INPUTS and torch.is_tensor(value) and value.is_floating_point()
    }
    return args, kwargs | media


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
    """Return the kind of each token id that the configuration, or that of its vision tower, names as a placeholder."""
    parts = (setting(config, "vision_config"), config)
    found = {setting(part, key): kind for part in parts for key, kind in _KEYS}
    return {token: kind for token, kind in found.items() if isinstance(token, int)}


def find_kinds(token_ids: Tensor, kinds: dict[int, int]) -> Tensor:
    """Return the kinds of token ids, int64 of the same shape."""
    found = torch.zeros_like(token_ids)
    for token, kind in kinds.items():
        found.masked_fill_(token_ids == token, kind)
    return found
