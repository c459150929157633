"""What layers keep of a micro-batch for its backward pass, and an engine of its answers, by a model's sizes."""

import json
from dataclasses import dataclass
from pathlib import Path

LOGITS = (
    2 << 28
)  # bytes of the two buffers in which log-probs are found, chunk by chunk (`r1_core.learner.linear_head`)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a text model, as its configuration gives them."""

    layers: int
    hidden: int
    keys: int  # of all key heads together
    width: int  # of the MLP

    @property
    def token_of_a_layer(self) -> int:
        """How many numbers a gated layer in half precision keeps of a token: norms, projections, products.

        Counted by torch's own hooks on saved tensors (Qwen2); `test_config_phases.py` counts them again.
        """
        return 10 * self.hidden + 2 * self.keys + 4 * self.width


def read_sizes(folder: Path) -> Sizes | None:
    """Return the sizes that `config.json` names, None where it is of another form."""
    try:
        whole = json.loads((folder / "config.json").read_text())
        text = whole.get("text_config") or whole
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        keys = (text.get("num_key_value_heads") or heads) * size
        return Sizes(text["num_hidden_layers"], text["hidden_size"], keys, text["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def activation_bytes(sizes: Sizes, tokens: int, number: int, *, checkpointed: bool, on_host: bool = False) -> int:
    """Return what a micro-batch of so many tokens takes on its way back, at least.

    Args:
        number: bytes of one that layers compute with.
        checkpointed: layers keep their input only, and one at a time is computed again.
        on_host: these inputs are with the processor but for one.
    """
    inputs = 1 if on_host else sizes.layers
    kept = inputs * sizes.hidden if checkpointed else sizes.layers * sizes.token_of_a_layer
    again = sizes.token_of_a_layer if checkpointed else 0
    return tokens * number * (kept + again) + LOGITS


def cache_bytes(sizes: Sizes, tokens: int, number: int) -> int:
    """Return what keys and values of so many tokens take."""
    return 2 * sizes.layers * sizes.keys * tokens * number
