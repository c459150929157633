"""Position ids of a prompt, computed by the model's own code."""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from r1_data.types import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, ProcessorMixin

PositionIds = Callable[["Tensor", "Mapping[str, Tensor]"], "Tensor"]

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


class RotaryPositions:
    """M-RoPE (arXiv 2409.12191), computed by a copy of the model without weights."""

    def __init__(self, config: "PretrainedConfig") -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self.config = config
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"  # it attends to nothing, so what a loaded model attends by is not sought
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config)
        self.model = getattr(whole, "model", whole)  # Llama 4 has its parts in the whole

    def __reduce__(self) -> tuple[object, ...]:
        return RotaryPositions, (self.config,)

    def __call__(self, token_ids: "Tensor", media: "Mapping[str, Tensor]") -> "Tensor":
        """Return int64 [4, L] for token ids [L] and media inputs with `mm_token_type_ids` [1, L].

        M-RoPE has three rotary axes; the text axis before them separates packed sequences.
        """
        import torch

        kinds = media.get("mm_token_type_ids")
        kinds = torch.zeros_like(token_ids) if kinds is None else kinds.reshape(-1)
        grids = {name: media[name] for name in _GRIDS if name in media}
        rotary, _ = self.model.get_rope_index(token_ids[None], mm_token_type_ids=kinds[None], **grids)
        return torch.cat([torch.arange(len(token_ids))[None], rotary[:, 0]])


def position_ids_of(config: "PretrainedConfig") -> PositionIds | None:
    """Return the rule of the model with this Hugging Face configuration, None if positions count tokens."""
    if not hasattr(config, "vision_config"):
        return None
    positions = RotaryPositions(config)
    return positions if hasattr(positions.model, "get_rope_index") else None


def count_tokens(token_ids: "Tensor", media: "Mapping[str, Tensor]") -> "Tensor":
    import torch

    return torch.arange(len(token_ids))[None]


def find_rule(processor: "ProcessorMixin") -> PositionIds:
    """Return the rule of the model that a vision-language processor belongs to.

    Raises DataError if its folder or hub name has no configuration that names the model.
    """
    from transformers import AutoConfig

    name = getattr(getattr(processor, "tokenizer", processor), "name_or_path", "")
    try:
        config = AutoConfig.from_pretrained(name) if name else None
    except (OSError, ValueError):
        config = None
    if config is None:
        raise DataError(
            f"where pictures stand depends on the model, and the processor's folder {name!r} has no config.json; give "
            "Renderer(position_ids=position_ids_of(config)) of r1_data.positions with the model's configuration"
        )
    return position_ids_of(config) or count_tokens
