"""Weights on disk between the learner and the servers: safetensors files of bounded size in one folder."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from r1_rollout.weights import buckets


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int, dtype: torch.dtype | None = None
) -> dict[str, list[int]]:
    """Write `weights` into a new `folder`, one bucket in memory at a time; return the tensors' shapes by name.

    The folder appears under its name when it is whole.

    Args:
        weights: names as in the Hugging Face checkpoint.
        folder: must not exist.
        max_bytes: size of a file, and of what is held in memory beside the model; one larger tensor goes alone.
        dtype: what floating-point tensors are written as; None: as they are.
    """
    from safetensors.torch import save_file

    draft = folder.with_name(folder.name + ".partial")
    draft.mkdir(parents=True)
    shapes: dict[str, list[int]] = {}
    try:
        for number, bucket in enumerate(buckets(weights, max_bytes, dtype)):
            save_file(_apart(bucket), draft / f"{number:05d}.safetensors")
            shapes |= {name: list(tensor.shape) for name, tensor in bucket}
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

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no weights; does this machine see the sender's disk?")
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                yield name, shard.get_tensor(name)
