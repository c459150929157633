"""What layers keep of a micro-batch for its backward pass, and an engine of its answers, by a model's sizes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # what families call their number
LOGITS = 2 << 28  # bytes of the two buffers of log-probs, chunk by chunk (`r1_core.learner.linear_head`), at most


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a text model, as its configuration gives them."""

    layers: int
    hidden: int
    keys: int  # of all key heads together
    width: int  # of the MLP; of all experts that a token goes through
    vocabulary: int = 1 << 30  # unknown: the chunk of log-probs is as large as it may be
    experts: int = 1  # of a mixture's layer
    chosen: int = 1  # of them, by a token

    @property
    def token_of_a_layer(self) -> int:
        """How many numbers a gated layer in half precision keeps of a token: norms, projections, products.

        Counted by torch's own hooks on saved tensors (Qwen2); `test_config_phases.py` counts them again.
        """
        return 10 * self.hidden + 2 * self.keys + 4 * self.width


@dataclass(frozen=True, slots=True)
class Tower:
    """Of a vision tower, as its configuration gives them."""

    layers: int
    hidden: int
    width: int
    patch: int  # pixels along its edge
    merged: int  # patches that become one token
    frames: int  # that stand behind one another in a patch
    gated: bool = False
    products: int = 2  # numbers that the MLP keeps for each of its width

    @property
    def patch_of_a_layer(self) -> int:
        """How many numbers a layer keeps of a patch, counted by the same hooks (Qwen2-VL, 2.5, 3)."""
        return 15 * self.hidden + 4 * self.width if self.gated else 11 * self.hidden + self.products * self.width

    @property
    def patch_at_the_ends(self) -> int:
        """The same of what is before the layers and of the merger behind them, about."""
        return 7 * self.hidden

    @property
    def pixels(self) -> int:
        """How many numbers the model is given of a patch."""
        return 3 * self.frames * self.patch**2


def read_sizes(folder: Path) -> Sizes | None:
    """Return the sizes that `config.json` names, None where it is of another form."""
    try:
        whole = json.loads((folder / "config.json").read_text())
        text = whole.get("text_config") or whole
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        keys = (text.get("num_key_value_heads") or heads) * size
        of_layers = text["num_hidden_layers"], text["hidden_size"], keys, _width(text)
        vocabulary = text.get("vocab_size") or whole.get("vocab_size") or 1 << 30
        experts = next((text[name] for name in EXPERTS if text.get(name)), 1)
        return Sizes(*of_layers, vocabulary, experts, text.get("num_experts_per_tok") or 1 if experts > 1 else 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _width(text: dict[str, Any]) -> int:
    """Of the MLP that a token goes through: of mixtures the experts that it chooses and those that all share."""
    chosen = text.get("num_experts_per_tok")
    if not chosen:
        return int(text["intermediate_size"])
    own = text.get("moe_intermediate_size") or text["intermediate_size"]
    return int(chosen * own + (text.get("shared_expert_intermediate_size") or 0))


def read_tower(folder: Path) -> Tower | None:
    """Return the sizes of the vision tower that `config.json` names, None without one, or of another form."""
    try:
        vision = json.loads((folder / "config.json").read_text())["vision_config"]
        hidden = vision.get("embed_dim") or vision["hidden_size"]
        width = vision.get("intermediate_size") or int(hidden * vision["mlp_ratio"])
        return Tower(
            layers=vision.get("depth") or vision["num_hidden_layers"],
            hidden=hidden,
            width=width,
            patch=vision.get("patch_size") or vision["spatial_patch_size"],
            merged=(vision.get("spatial_merge_size") or 1) ** 2,
            frames=vision.get("temporal_patch_size") or 1,
            gated=str(vision.get("model_type")).startswith("qwen2_5_vl"),
            products=3 if vision.get("hidden_act", "quick_gelu") == "quick_gelu" else 2,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def activation_bytes(sizes: Sizes, tokens: int, number: int, *, checkpointed: bool, on_host: bool = False) -> int:
    """Return what layers keep of a micro-batch of so many tokens for its way back, at least.

    Args:
        number: bytes of one that layers compute with.
        checkpointed: layers keep their input only, and one at a time is computed again.
        on_host: these inputs are with the processor but for one.
    """
    inputs = 1 if on_host else sizes.layers
    kept = inputs * sizes.hidden if checkpointed else sizes.layers * sizes.token_of_a_layer
    again = sizes.token_of_a_layer if checkpointed else 0
    return tokens * number * (kept + again)


def tower_bytes(tower: Tower, patches: int, number: int, *, checkpointed: bool, on_host: bool = False) -> int:
    """The same of a vision tower that is trained, for so many patches."""
    inputs = 1 if on_host else tower.layers
    kept = inputs * tower.hidden if checkpointed else tower.layers * tower.patch_of_a_layer
    again = tower.patch_of_a_layer if checkpointed else 0
    return patches * number * (kept + again + tower.patch_at_the_ends)


def chunk_bytes(sizes: Sizes, tokens: int) -> int:
    """Return what the two buffers take in which log-probs of so many tokens are found."""
    return min(LOGITS, 2 * 4 * tokens * sizes.vocabulary)


def cache_bytes(sizes: Sizes, tokens: int, number: int) -> int:
    """Return what keys and values of so many tokens take."""
    return 2 * sizes.layers * sizes.keys * tokens * number
