"""Which models the embedded engine can decode with, and how long their sequences may be."""

from dataclasses import dataclass
from inspect import signature
from typing import Any

from transformers import PreTrainedModel

from r1_rollout.embedded.kv import ATTENTION

# Within their window, sliding layers are full ones.
_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Reach:
    """How long a prompt with its answer may be."""

    positions: int | None  # that the model knows; None if its rotary embedding is stretched beyond them
    window: int | None  # tokens that its sliding layers see; None without such layers


def prepare(model: Any) -> Reach:
    """Let `model` attend through the engine's cache; return its reach.

    Raises:
        ValueError: it cannot, or not correctly: it has layers of another kind, an attention of its own, latent keys
            (arXiv 2405.04434), or counts positions by itself, which rows of different ages do not allow.
    """
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"the embedded engine takes a transformers.PreTrainedModel, got a {type(model).__name__}")
    text = model.config.get_text_config()
    model.set_attn_implementation(ATTENTION)
    kinds = set(getattr(text, "layer_types", None) or ()) - _LAYERS
    if kinds:
        obstacle = f"{', '.join(sorted(kinds))} layers"
    elif text._attn_implementation != ATTENTION or not all(part._supports_sdpa for part in _decoders(model, text)):
        obstacle = "attention of its own, which torch's scaled_dot_product_attention cannot replace"
    elif "position_ids" not in signature(model.forward).parameters:
        obstacle = "positions that cannot be given to it (its forward takes no position_ids)"
    elif getattr(text, "kv_lora_rank", None):
        obstacle = "multi-head latent attention"
    else:
        return Reach(_known_positions(text), _window(text))
    raise ValueError(f"{type(model).__name__} has {obstacle}: the embedded engine cannot sample from it, vLLM may")


def _decoders(model: Any, text: Any) -> list[Any]:
    """Return the parts of the model that have the text's configuration, the model itself included."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
    return [model, *parts]


def _known_positions(text: Any) -> int | None:
    rope = getattr(text, "rope_parameters", None) or {}
    known: int | None = getattr(text, "max_position_embeddings", None)
    return known if rope.get("rope_type", "default") == "default" else None


def _window(text: Any) -> int | None:
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    return (getattr(text, "sliding_window", None) or None) if slides else None
