"""Which models the embedded engine can decode with, and how long their sequences may be."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from r1_rollout.embedded.attention import ATTENTION
from r1_rollout.embedded.forward import Forward
from r1_rollout.embedded.states import count_states
from r1_rollout.embedded.windows import CHUNKED, AttentionWindow, layer_windows
from r1_rollout.tokens import setting

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = {"full_attention", "sliding_attention", CHUNKED}
# Layers that keep a state which the cache can hold, and those without attention and state.
_RECURRENT = {"linear_attention", "conv", "mlp", "moe"}

OWN = "attention or a state of its own, which the engine's cannot replace"


@dataclass(frozen=True, slots=True)
class Reach:
    positions: int | None  # that the model knows; None if its rotary embedding is stretched beyond them
    windows: tuple[AttentionWindow | None, ...]  # see `layer_windows`


def prepare(model: PreTrainedModel) -> Reach:
    """Let `model` attend through the engine's cache; return its reach.

    Raises:
        ValueError: the engine cannot decode with its layers, its attention, latent keys (arXiv 2405.04434), or
            positions that it counts by itself.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"the embedded engine takes a transformers.PreTrainedModel, got a {type(model).__name__}")
    text = model.config.get_text_config()
    model.set_attn_implementation(ATTENTION)
    kinds = {*(setting(text, "layer_types") or ())}
    recurrent = bool(count_states(model)) and bool(kinds)
    unknown, forward = kinds - _LAYERS - ({*_RECURRENT, "hybrid"} if recurrent else set()), Forward(model)
    try:
        windows: tuple[AttentionWindow | None, ...] | None = layer_windows(model)
    except AttributeError:  # as BLT's, which has models of several widths
        windows = None
    if unknown:
        obstacle = f"{', '.join(sorted(unknown))} layers"
    elif forward.cache is None:
        obstacle = OWN
    elif windows is None:
        obstacle = "layers that its configuration does not list"
    elif recurrent and kinds <= _RECURRENT:
        return Reach(None, ())
    elif text._attn_implementation != ATTENTION or not all(map(_can_replace_attention, _decoders(model, text))):
        obstacle = OWN
    elif not forward.positions:
        obstacle = "positions that cannot be given to it (its forward takes no position_ids)"
    else:
        return Reach(_known_positions(text), windows)
    raise ValueError(f"the embedded engine cannot sample from {type(model).__name__} (it has {obstacle}), vLLM may")


def _decoders(model: PreTrainedModel, text: "PreTrainedConfig") -> list[Any]:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
    return [model, *parts]


def _can_replace_attention(part: PreTrainedModel) -> bool:
    return bool(part._supports_sdpa or part._supports_attention_backend)  # gpt-oss, for its sinks, has only the second


def _known_positions(text: "PreTrainedConfig") -> int | None:
    rope = setting(text, "rope_parameters") or {}
    known: int | None = setting(text, "max_position_embeddings")
    return known if rope.get("rope_type", "default") == "default" else None
