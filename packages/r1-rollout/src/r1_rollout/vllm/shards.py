"""Weights on disk between the learner and the servers: safetensors files of bounded size in one folder."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.vllm.adapter import write_adapter
from r1_rollout.vllm.shapes import Shapes
from r1_rollout.weights import Weights, buckets


@dataclass(frozen=True, slots=True)
class Written:
    """What stands in a folder of weights."""

    shapes: Shapes
    adapter: bool


def write_weights(weights: Weights, folder: Path, max_bytes: int, dtype: torch.dtype | None = None) -> Written:
    """Write weights, or an adapter in PEFT's format, into a new `folder`; to be run where the weights are.

    Raises:
        WeightsError: the adapter is empty.
    """
    if not isinstance(weights, Adapter):
        return Written(write_shards(weights, folder, max_bytes, dtype), adapter=False)
    folder.mkdir()
    try:
        return Written(write_adapter(weights, folder), adapter=True)
    except ValueError as error:
        raise WeightsError(str(error)) from error


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int, dtype: torch.dtype | None = None
) -> Shapes:
    """Write `weights` into a new `folder`, one bucket in memory at a time; return the tensors' shapes by name.

    The folder appears under its name when it is whole.

    Args:
        weights: names as in the Hugging Face checkpoint.
        folder: must not exist.
        max_bytes: size of a file, and of what is held in memory beside the model; one larger tensor goes alone.
        dtype: what floating-point tensors are written as; None: as they are.
    """
    return write_buckets(buckets(weights, max_bytes, dtype), folder)


def write_buckets(parts: Iterable[list[tuple[str, Tensor]]], folder: Path) -> Shapes:
    """Do what `write_shards` does with weights that are in buckets already, one file for each."""
    from safetensors.torch import save_file

    draft = folder.with_name(folder.name + ".partial")
    draft.mkdir(parents=True)
    shapes: Shapes = {}
    try:
        for number, bucket in enumerate(parts):
            save_file(_apart(bucket), draft / f"{number:05d}.safetensors")
            shapes |= {name: tuple(tensor.shape) for name, tensor in bucket}
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return shapes


def _apart(bucket: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the bucket in main memory, with no two tensors in one storage, as the format wants it."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in bucket:
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


def read_shards(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of `write_shards` one at a time.

    Raises:
        FileNotFoundError: the folder is not there, or has no shards.
    """
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                yield name, shard.get_tensor(name)


def read_buckets(folder: str | Path) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the buckets of `write_buckets`, one in memory at a time. Raises as `read_shards` does."""
    from safetensors.torch import load_file

    for file in _files(folder):
        yield list(load_file(file).items())


def count_tensors(folder: Path) -> int:
    """Return how many tensors `read_shards` yields. Raises as it does."""
    from safetensors import safe_open

    total = 0
    for file in _files(folder):
        with safe_open(file, framework="pt") as shard:
            total += len(shard.keys())
    return total


def _files(folder: str | Path) -> list[Path]:
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no weights; does this machine see the sender's disk?")
    return files
