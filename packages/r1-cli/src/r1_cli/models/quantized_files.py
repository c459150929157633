"""Checkpoints that are published in fewer bits: training reads them as plain weights, and saves plain weights."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from r1_cli.models.families import find_value

# What transformers can turn into plain weights while it reads them, by the method in config.json.
READERS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
FOUR_BITS = "bitsandbytes"  # what quantization=nf4 makes, too


def find_method(config: PreTrainedConfig) -> str | None:
    """Return how the files of a model are quantized, by its config.json; None: they are not."""
    parts = config, find_value(config, "text_config")
    found = next((held for part in parts if (held := find_value(part, "quantization_config"))), None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else find_value(found, "quant_method")
    return str(find_value(method, "value") or method)


def find_fault(config: PreTrainedConfig, quantization: str | None) -> str | None:
    """Return why the files cannot be trained on with `worker.actor.model.quantization`, None if they can."""
    method, plain = find_method(config), "name a checkpoint of the same model in bf16"
    if method is None or (method in READERS and quantization is None) or (method == FOUR_BITS and quantization):
        return None
    if method == FOUR_BITS:
        return f"its weights are published in 4 bits (bitsandbytes): set quantization=nf4 with an adapter, or {plain}"
    if method in READERS:
        return f"its weights are published as {method}, of which quantization={quantization} cannot be made: {plain}"
    return f"its weights are published as {method}, r1 reads {', '.join(READERS)} and plain weights: {plain}"


def plain_options(config: PreTrainedConfig) -> dict[str, object]:
    """Return the options of `from_pretrained` that read quantized files as plain weights; {} for plain files.

    On a GPU transformers would otherwise compute in 8 or 4 bits, which have no gradient.
    """
    method = find_method(config)
    if method not in READERS:
        return {}
    return {"quantization_config": getattr(transformers, READERS[method])(dequantize=True)}


def read_whole(family: Any, path: str, choices: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model and report of `family.from_pretrained`, the weights in the precision that was asked for.

    Transformers reads quantized files as bfloat16, whatever is asked for, and FSDP takes one precision only.
    """
    model, info = family.from_pretrained(path, **choices)
    if find_value(choices.get("quantization_config"), "dequantize"):
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.to(choices["dtype"])
    return model, info


def without_quantization(config: PreTrainedConfig) -> Any:
    """Return a configuration that describes plain weights, a copy if it has to change."""
    if find_method(config) is None:
        return config
    plain: Any = copy.deepcopy(config)
    for part in (plain, find_value(plain, "text_config")):
        if find_value(part, "quantization_config") is not None:
            del part.quantization_config
    return plain
