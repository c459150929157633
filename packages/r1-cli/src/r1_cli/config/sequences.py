"""Whether the ranks of a node can share a model's sequences (`ulysses_size`), by its configuration."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from r1_cli.config.errors import ConfigError, Problem
from r1_cli.config.root import Owner, RunConfig
from r1_cli.config.worker import ModelConfig, UpdateConfig

FULL = "full_attention"
READ = ("model_type", "num_attention_heads", "num_key_value_heads", "layer_types", "sliding_window")


def sequence_problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for what forbids ranks to share sequences, as far as it can be known without torch."""
    per_node = config.trainer.n_gpus_per_node
    owners: dict[str, UpdateConfig] = {"actor": config.worker.actor}
    owners |= {"critic": config.worker.critic} if config.has_critic else {}
    for name, owner in owners.items():
        key, size = f"worker.{name}.ulysses_size", owner.ulysses_size
        if size == 1:
            continue
        if per_node % size:
            yield key, f"must divide trainer.n_gpus_per_node = {per_node}: a sequence is shared by devices of one node"
            continue
        if not owner.padding_free:
            yield key, f"cuts packed rows: set worker.{name}.padding_free=true, or 1"
        text = _read_text(owner.model)
        if "num_attention_heads" in text:  # families have other names for it, too, which transformers knows
            yield from ((key, message) for message in _misfits(text, size, per_node))


def require_shareable(config: RunConfig, text: Any, owner: Owner = "actor") -> None:
    """Refuse ranks that would share what the layers of a model cannot give them.

    Args:
        text: the Hugging Face configuration of the text part of the owner's model.

    Raises:
        ConfigError: names the sizes that would do.
    """
    size = config.sequence_ranks(owner)
    if size > 1:
        found = _misfits({name: getattr(text, name, None) for name in READ}, size, config.trainer.n_gpus_per_node)
        problems = [Problem(f"worker.{owner}.ulysses_size", message, str(size)) for message in found]
        if problems:
            raise ConfigError(problems)


def _misfits(text: Mapping[str, Any], size: int, per_node: int) -> Iterator[str]:
    """Yield what in a text model's configuration forbids `size` ranks to share its rows."""
    heads, family = text.get("num_attention_heads"), text.get("model_type")
    kinds = sorted({*(text.get("layer_types") or [FULL])} - {FULL})
    if text.get("sliding_window") and text.get("layer_types") is None and text.get("use_sliding_window", True):
        kinds.append("sliding_attention")
    if kinds:
        yield f"takes layers that attend to all tokens, {family} has others ({', '.join(kinds)}): set 1"
    elif not heads:
        yield f"shares attention heads, and {family} names none: set 1"
    else:
        key_heads = text.get("num_key_value_heads") or heads
        fitting = [n for n in range(1, heads + 1) if per_node % n == 0 and divide_heads(heads, key_heads, n)]
        if size not in fitting:
            would = " or ".join(map(str, fitting))
            yield (
                f"must divide the {heads} heads of attention, and divide its {key_heads} key heads or be "
                f"a multiple of them; on nodes of {per_node} devices {would} would do"
            )


def divide_heads(heads: int, key_heads: int, size: int) -> bool:
    """Whether so many ranks can share attention of so many heads: each gets as many, and key heads that fit them."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def _read_text(model: ModelConfig) -> Mapping[str, Any]:
    """Return the text part of a local model's `config.json`; nothing if there is none, of which `files` tells."""
    try:
        found = json.loads((Path(model.model_path or "") / "config.json").read_text("utf-8")) | model.override_config
    except (OSError, ValueError, TypeError):
        return {}
    text: Mapping[str, Any] = found.get("text_config") or found
    return text
