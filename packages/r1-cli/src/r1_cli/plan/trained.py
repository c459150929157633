"""How many weights a run trains, by the names and shapes in the model's files, before anything is loaded."""

import re
from collections.abc import Iterable, Mapping
from math import prod

from r1_cli.config.model import LoraConfig, ModelConfig

Shapes = Mapping[str, tuple[int, ...]]  # by name of a tensor
# Tables that look like a linear layer's weight and are none, and the head, which all-linear leaves out.
TABLES = ("embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "position_embeddings", "pos_embed", "lm_head")


def count_trained(model: ModelConfig, shapes: Shapes, factors: Shapes) -> int:
    """Return how many weights are trained.

    Args:
        shapes: of the model's tensors.
        factors: of those of `lora.path`, if it is set.
    """
    if model.lora.path:
        return sum(map(prod, factors.values()))
    if model.lora.rank:
        linear = [shape for name, shape in shapes.items() if _is_adapted(name, shape, model.lora)]
        return sum(model.lora.rank * sum(shape) for shape in linear)
    return sum(prod(shape) for name, shape in shapes.items() if not _is_frozen(name, model))


def _is_frozen(name: str, model: ModelConfig) -> bool:
    if model.freeze_vision_tower and "visual." in name:
        return True
    return any(_matches(pattern, name) for pattern in model.freeze)


def _is_adapted(name: str, shape: tuple[int, ...], lora: LoraConfig) -> bool:
    module = name.removesuffix(".weight")
    if module == name or len(shape) != 2 or _ends(TABLES, module):
        return False
    excluded, targets = lora.exclude_modules, lora.target_modules
    if excluded is not None and (_matches(excluded, module) if isinstance(excluded, str) else _ends(excluded, module)):
        return False
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(targets, module)
    return _ends(targets, module)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # said by name when the model is there
        return False


def _ends(ends: Iterable[str], name: str) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
