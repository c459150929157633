"""Tensors on disk: safetensors files, in shards when they are large, the same for every world size."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from r1_core.learner.parallel import like, whole

SHARD_BYTES = 5_000_000_000


def write_tensors(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], *, write: bool, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `stem.safetensors`, or `stem-00001-of-0000N.safetensors` and `stem.safetensors.index.json` if large.

    Holds one shard in memory at a time. Sharded tensors are gathered, so every rank must call this; only the one with
    `write` keeps and writes them.
    """
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
        total += num_bytes
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        full = {}
        for name in names:
            tensor = whole(tensors[name])
            if write:
                full[name] = tensor.cpu().contiguous()
        if write:
            save_file(full, folder / file, metadata={"format": "pt"})
    if write and len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_tensors(folder: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and CPU tensors that `write_tensors` wrote, one at a time.

    Raises FileNotFoundError if there is neither a single file nor an index.
    """
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif (folder / f"{stem}.safetensors").exists():
        files = [f"{stem}.safetensors"]
    else:
        raise FileNotFoundError(f"{folder} has neither {stem}.safetensors nor {index.name}; is it a checkpoint?")
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def restore(model: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: Path) -> None:
    """Copy named full tensors into the model's parameters and persistent buffers, sharded or not.

    Raises ValueError that names the tensor if one is missing, unknown or of another shape.
    """
    targets = dict(named_state(model))
    missing = set(targets)
    for name, tensor in tensors:
        if name not in targets:
            raise ValueError(f"{source}: tensor {name!r} is not in the model; is this a checkpoint of another model?")
        if tensor.shape != targets[name].shape:
            raise ValueError(
                f"{source}: {name!r} has shape {[*tensor.shape]}, the model's has {[*targets[name].shape]}"
            )
        targets[name].detach().copy_(like(tensor, targets[name]))
        missing.discard(name)
    if missing:
        raise ValueError(f"{source}: the model's tensor {min(missing)!r} is missing ({len(missing)} in all)")


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under their state-dict names; tied ones once."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in parameters:
            yield name, value


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """The optimizer's state as tensors `exp_avg.<parameter>` and numbers {"step": {<parameter>: 12.0}}."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float]] = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if value.dim() == 0:
                numbers.setdefault(key, {})[name] = value.item()
            else:
                tensors[f"{key}.{name}"] = value
    return tensors, numbers


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Iterable[tuple[str, Tensor]],
    numbers: Mapping[str, Mapping[str, float]],
    source: Path,
) -> None:
    """Put back what `optimizer_state` gave. Raises ValueError if a tensor belongs to no trained parameter."""
    params = dict(model.named_parameters())
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    state: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors:
        key, _, name = full_name.partition(".")
        if name not in params or id(params[name]) not in trained:
            raise ValueError(f"{source}: optimizer tensor {full_name!r} belongs to no trained parameter of this model")
        state.setdefault(name, {})[key] = like(tensor, params[name])
    for key, values in numbers.items():
        for name, number in values.items():
            state.setdefault(name, {})[key] = torch.tensor(number)
    # The optimizer's own dict counts parameters; names make it independent of their order.
    order = [param for group in optimizer.param_groups for param in group["params"]]
    names = {id(param): name for name, param in params.items()}
    own = optimizer.state_dict()
    own["state"] = {i: state[names[id(param)]] for i, param in enumerate(order) if names[id(param)] in state}
    optimizer.load_state_dict(own)
