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
    from transformers.models.auto import modeling_auto as names

    # Those that are listed among the causal models alone count tokens.
    causal = names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    if not hasattr(config, "vision_config") or config.model_type in causal:
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


def append_positions(position_ids: "Tensor", piece: "Tensor") -> "Tensor":
    """Lay a piece's positions, counted from 0, behind those of all tokens before it.

    The first axis counts tokens. The rotary axes of M-RoPE (arXiv 2409.12191) go on behind the largest position of any
    of them, as the model's own rule does over the whole sequence.

    Args:
        position_ids: int64 [axes, P].
        piece: int64 [axes, L].

    Returns:
        int64 [axes, P + L].
    """
    import torch

    if not position_ids.shape[1]:
        return piece
    moved = piece + (position_ids[:1].max() + 1)
    if len(position_ids) > 1:
        moved = torch.cat([moved[:1], piece[1:] + (position_ids[1:].max() + 1)])
    return torch.cat([position_ids, moved], dim=1)
