"""Weight transfer through a folder: safetensors files of bounded size, which many processes may write and read."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from r1_rollout.weights import LocalWeights, Shapes, WeightSource

# Said of a folder by a process that has weights to write and does not find it.
UNSEEN = "is not seen by the process that has the weights: give a folder that every machine sees"


@dataclass(slots=True)
class PushedWeights:
    """The weights that every server of a pool is to have."""

    folder: Path
    label: str  # unique for each push, so that a stale server cannot be mistaken for a fresh one
    version: int
    base: "PushedWeights | None" = None  # the full weights that these, an adapter's, are added to
    tensors: int = 0  # known when they have been written

    @property
    def address(self) -> dict[str, str]:
        """The field of a request that selects these weights: vLLM calls an adapter by its name."""
        return {"model": self.label} if self.base else {}


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """A `BucketWriter` that writes each bucket to a file, from any number of processes."""

    folder: Path

    def reaches(self) -> bool:
        return self.folder.is_dir()

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not self.reaches():
            raise FileNotFoundError(f"{self.folder} {UNSEEN}")
        file = self.folder / f"{number:05d}.safetensors"
        try:
            save_file(_unshared(bucket), file)
        except SafetensorError as error:  # raised for a full disk
            raise OSError(f"{file}: {error}") from error


def write_source(source: WeightSource, folder: Path, max_bytes: int, dtype: torch.dtype | None = None) -> Shapes:
    """Write full weights into a new `folder`, by the processes that have them; return their shapes by name.

    The folder appears under its name when it is complete.

    Args:
        source: names as in the Hugging Face checkpoint.
        folder: must not exist.
        max_bytes: of a file; one larger tensor goes alone.
        dtype: what floating-point tensors are written as; None: as they are.

    Raises:
        OSError: a process cannot write, or does not see the folder.
    """
    with new_folder(folder) as draft:
        shapes = source.spread(ShardWriter(draft), max_bytes, dtype)
        if (seen := count_tensors(draft)) != len(shapes):
            raise FileNotFoundError(f"{folder}: {len(shapes)} weights were written, and {seen} are seen here")
        return shapes


def write_shards(
    weights: Iterable[tuple[str, Tensor]], folder: Path, max_bytes: int, dtype: torch.dtype | None = None
) -> Shapes:
    return write_source(LocalWeights(weights, 0), folder, max_bytes, dtype)


def write_buckets(parts: Iterable[list[tuple[str, Tensor]]], folder: Path) -> None:
    with new_folder(folder) as draft:
        for number, bucket in enumerate(parts):
            ShardWriter(draft)(number, bucket)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder` at the end of the block, or is removed if that fails."""
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


def _unshared(bucket: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    seen: set[int] = set()
    unshared = {}
    for name, tensor in bucket:
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return unshared


def read_shards(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a folder one at a time. Raises FileNotFoundError if there are none."""
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no dict)
                yield name, shard.get_tensor(name)


def read_buckets(folder: str | Path) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors, one file in memory at a time."""
    from safetensors.torch import load_file

    for file in _files(folder):
        yield list(load_file(file).items())


def count_tensors(folder: Path) -> int:
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
