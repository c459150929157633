"""Weights on disk between the learner and the servers: safetensors files of bounded size in one folder."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.vllm.adapter import write_adapter
from r1_rollout.weight_source import LocalWeights, Shapes, WeightSource
from r1_rollout.weights import Weights

# Said of a folder by the process that has weights to write and does not find it.
UNSEEN = "is not seen by the process that has the weights: hand them over in a folder that every machine sees"


@dataclass(frozen=True, slots=True)
class Written:
    """What stands in a folder of weights."""

    shapes: Shapes
    adapter: bool


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writes buckets into a folder, a file each: a `BucketWriter` for any number of processes at the same time."""

    folder: Path

    def reaches(self) -> bool:
        """Say whether this process sees the folder."""
        return self.folder.is_dir()

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None:
        """Write one file. Raises OSError if the disk is full, FileNotFoundError if the folder is not seen here."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self.reaches():
            raise FileNotFoundError(f"{self.folder} {UNSEEN}")
        file = self.folder / f"{number:05d}.safetensors"
        try:
            save_file(_apart(bucket), file)
        except SafetensorError as error:  # what a full disk is to it
            raise OSError(f"{file}: {error}") from error


def write_source(source: WeightSource, folder: Path, max_bytes: int, dtype: torch.dtype | None = None) -> Written:
    """Have weights, or an adapter in PEFT's format, written into a new `folder` by the processes that have them.

    The folder is made here and appears under its name when it is whole, which is looked at here, too.

    Args:
        source: names as in the Hugging Face checkpoint.
        folder: must not exist.
        max_bytes: size of a file, and of what a process holds in memory beside the model; one larger tensor goes alone.
        dtype: what floating-point tensors of full weights are written as; None: as they are.

    Raises:
        WeightsError: the adapter is empty.
        OSError: a process cannot write, or does not see the folder.
    """
    with _drafted(folder) as draft:
        if isinstance(source.names(), Adapter):
            return source.run_with_weights(partial(_write_adapter, folder=draft))
        written = Written(source.spread(ShardWriter(draft), max_bytes, dtype), adapter=False)
        if (seen := count_tensors(draft)) != len(written.shapes):
            raise FileNotFoundError(f"{folder}: {len(written.shapes)} weights were written, and {seen} are seen here")
        return written


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int, dtype: torch.dtype | None = None
) -> Shapes:
    """Do what `write_source` does with full weights in this process; return their shapes by name."""
    return write_source(LocalWeights(weights, 0), folder, max_bytes, dtype).shapes


def write_buckets(parts: Iterable[list[tuple[str, Tensor]]], folder: Path) -> None:
    """Write weights that are in buckets already, as `write_source` does."""
    with _drafted(folder) as draft:
        for number, bucket in enumerate(parts):
            ShardWriter(draft)(number, bucket)


@contextmanager
def _drafted(folder: Path) -> Iterator[Path]:
    """Give an empty folder that becomes `folder` at the end of the block, or goes if that fails."""
    draft = folder.with_name(folder.name + ".partial")
    try:
        draft.mkdir()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder.parent} {UNSEEN}") from error
    try:
        yield draft
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_adapter(weights: Weights, folder: Path) -> Written:
    """Write an adapter where its factors are."""
    assert isinstance(weights, Adapter)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} {UNSEEN}")
    try:
        return Written(write_adapter(weights, folder), adapter=True)
    except ValueError as error:
        raise WeightsError(str(error)) from error


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
