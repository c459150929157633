"""Load a model in shards: each rank reads only its own rows of the files."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

from r1_cli.models.adapters import Adapters
from r1_cli.models.quantized_files import read_whole
from r1_core.learner.parallel import Parallel, Shard, find_blocks, shard_model

logger = logging.getLogger("r1")

NEEDED = (5, 19)  # the version of transformers whose loader reads rows


class ShardedLoadingError(ValueError):
    """A model that cannot be read in shards; the message says why and what to do."""


def load_sharded(
    family: Any,
    path: str,
    parallel: Parallel,
    shard: Shard,
    choices: Mapping[str, object],
    adapters: Adapters | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return the model and report of `family.from_pretrained`, the model sharded over the ranks of `parallel`.

    All ranks must call it. Hugging Face's loader reads only rows if parameters are sharded before loading.

    Args:
        choices: options of `from_pretrained`, with the configuration.
        adapters: injected and sharded with the model, without values yet.

    Raises:
        ShardedLoadingError: this transformers cannot do it, or a rank would have no part of what the family merges.
    """
    if parallel.world == 1:  # its rows are all there are
        return _load_whole(family, path, parallel, shard, choices, adapters)
    require_sharded_loading()
    from transformers.distributed import DistributedConfig

    with torch.device("meta"):
        empty = family.from_config(choices["config"], trust_remote_code=choices["trust_remote_code"])
    quantized = "its files are quantized in blocks of rows" if "quantization_config" in choices else None
    if odd := quantized or find_row_mixing(empty):
        logger.warning("%s: every rank reads all of it, since loading mixes rows (%s)", path, odd)
        return _load_whole(family, path, parallel, shard, choices, adapters)
    sharding = _sharding(type(empty), parallel, shard, adapters)
    try:
        model, info = sharding.from_pretrained(path, distributed_config=DistributedConfig(), **choices)
    except RuntimeError as error:
        raise ShardedLoadingError(
            f"{path}: rank {parallel.rank} of {parallel.world} could not read its rows ({str(error).strip()}); where "
            "there are fewer experts than ranks, set worker.actor.fsdp.fsdp_size to no more ranks than experts"
        ) from error
    del sharding.get_parameter  # was for the loader
    empty.tie_weights()
    if len([*model.parameters()]) != len([*empty.parameters()]):
        raise ShardedLoadingError(
            f"{path}: its configuration ties weights of which the files hold different values; set "
            "worker.actor.model.override_config={tie_word_embeddings: false} to train them apart"
        )
    if adapters is not None:
        adapters.attach(model)
    return model, info


def _load_whole(
    family: Any, path: str, parallel: Parallel, shard: Shard, choices: Mapping[str, object], adapters: Adapters | None
) -> tuple[Any, dict[str, Any]]:
    model, info = read_whole(family, path, choices)
    if adapters is not None:
        adapters.inject(model)
    _shard(model, parallel, shard)
    return model, info


def require_sharded_loading() -> None:
    """Raise ShardedLoadingError if the installed transformers has no loader that reads rows."""
    version = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    if version < NEEDED:
        raise ShardedLoadingError(
            f"several ranks load a model in parts, which takes transformers {'.'.join(map(str, NEEDED))} or newer, and "
            f"this is {transformers.__version__}: install a newer one"
        )


def find_row_mixing(model: nn.Module) -> str | None:
    """Return how the loader would mix rows of the files, None if it does not.

    Operations on whole experts, or within each, keep rows. Splitting or joining rows of one matrix does not.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    for conversion in get_model_conversion_mapping(model):
        for step in conversion.operations if isinstance(conversion, WeightConverter) else ():
            if not _keeps_rows(step):
                return f"{type(step).__name__} of {', '.join(conversion.source_patterns)}"
    return None


def _keeps_rows(step: Any) -> bool:
    from transformers.core_model_loading import Chunk, Concatenate, Interleave, MergeModulelist, Transpose

    if type(step) is MergeModulelist:
        return bool(step.dim == 0)
    if type(step) is Transpose:
        return bool(min(step.dim0, step.dim1) > 0)
    return type(step) in (Chunk, Concatenate, Interleave) and step.dim > 0


def _sharding(model_class: Any, parallel: Parallel, shard: Shard, adapters: Adapters | None) -> Any:
    class Sharding(model_class):
        @classmethod
        def prepare_distribute_model(
            cls, distributed_config: object, device_map: object = None
        ) -> tuple[object, object, None]:
            return distributed_config, device_map, None

        @classmethod
        def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: None) -> Any:
            # Else the two names of a tied weight would be two weights to FSDP, gathered one after the other.
            model.tie_weights()
            if adapters is not None:
                adapters.inject(model)
            _shard(model, parallel, shard)
            if adapters is not None:  # or the loader would not find the weights inside them by their names
                adapters.detach(model)
            return model

        def get_parameter(self, target: str) -> Any:
            """Return a parameter; this rank's part of one that holds experts.

            The loader infers the orientation of a rank's experts in the files from its shape.
            """
            parameter = super().get_parameter(target)
            return parameter.to_local() if isinstance(parameter, DTensor) and parameter.ndim > 2 else parameter

    # The loader knows families by the names and modules of their classes.
    Sharding.__name__, Sharding.__qualname__ = model_class.__name__, model_class.__qualname__
    Sharding.__module__ = model_class.__module__
    return Sharding


def _shard(model: nn.Module, parallel: Parallel, shard: Shard) -> None:
    assert parallel.mesh is not None
    shard_model(model, find_blocks(model), parallel.mesh, shard)


def move_to_device(model: nn.Module, device: torch.device, *, offload: bool) -> nn.Module:
    """Move a sharded model to its device; with `offload` only its buffers, which are not sharded."""
    if not offload:
        return model.to(device)
    model.to("cpu")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    return model
