"""Safetensors files of sharded tensors: split by size, each written by one rank, read by slices; never pickle.

`torch.distributed.checkpoint` with its Hugging Face writer does not replace this: its files depend on the number of
ranks, and `model.safetensors` costs it a second write of all weights.
"""

import ctypes
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from r1_core.disk import force_to_disk, write_text
from r1_core.learner.parallel import Parallel, gather

FILE_BYTES = 2_000_000_000  # per file of a large checkpoint: the most that a rank holds besides its shards
ADAPTER = "adapter_model"  # always one file: peft and vLLM read no index
CHECKSUMS = "crc32"  # in a file's header: JSON, the checksum of each tensor by name
MESSAGE_BYTES = 500  # of an error message that is sent to all ranks


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file and the tensors in it.

    Example: `TensorFile("model-00001-of-00003.safetensors", ("embed.weight",), 1_090_519_040)`.
    """

    name: str
    tensors: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    file: Path
    shape: tuple[int, ...]


def cut(stem: str, tensors: Mapping[str, Tensor], file_bytes: int = FILE_BYTES) -> list[TensorFile]:
    """Assign tensors, in order, to files of at most `file_bytes`, or of one larger tensor.

    A single file is `stem.safetensors`, several are `stem-00001-of-0000N.safetensors`.
    """
    files: list[list[str]] = [[]]
    sizes = [0]
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if files[-1] and sizes[-1] + num_bytes > file_bytes and stem != ADAPTER:
            files.append([])
            sizes.append(0)
        files[-1].append(name)
        sizes[-1] += num_bytes
    numbered = [f"{stem}-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    names = numbered if len(files) > 1 else [f"{stem}.safetensors"]
    return [TensorFile(*file) for file in zip(names, map(tuple, files), sizes, strict=True)]


def owners(files: Sequence[TensorFile], world: int) -> list[int]:
    """Return the rank that writes each file: the one with the fewest bytes so far."""
    loads, ranks = [0] * world, []
    for file in files:
        ranks.append(min(range(world), key=loads.__getitem__))
        loads[ranks[-1]] += file.num_bytes
    return ranks


def write_tensors(
    folder: Path, parts: Mapping[str, Mapping[str, Tensor]], parallel: Parallel, file_bytes: int = FILE_BYTES
) -> None:
    """Write each part, tensors by name, into the files that `cut` assigns, with an index (see `indices`).

    All ranks must call this. A file's tensors are gathered on its owner; no rank holds more than its shards and one
    file.

    Raises:
        OSError: the disk is full, or the folder is not writable; on all ranks, after all files were visited.
    """
    plan = {stem: cut(stem, tensors, file_bytes) for stem, tensors in parts.items()}
    failure: OSError | None = None

    def write(name: str, tensors: dict[str, Tensor]) -> None:
        nonlocal failure
        try:
            if failure is None:
                save(tensors, folder / name)
        except OSError as error:
            failure = error

    visit_files(parts, plan, parallel, write)
    if parallel.rank == 0 and failure is None:
        try:
            for name, text in indices(plan).items():
                write_text(folder / name, text)
        except OSError as error:
            failure = error
    raise_together(failure, parallel)


def visit_files(
    parts: Mapping[str, Mapping[str, Tensor]],
    plan: Mapping[str, Sequence[TensorFile]],
    parallel: Parallel,
    visit: Callable[[str, dict[str, Tensor]], None],
    *,
    copy: bool = False,
) -> None:
    """Call `visit` with name and full CPU tensors of each file that this rank writes. All ranks must call this.

    The tensors may share memory with the parts unless `copy`.
    """
    work = [(file, tensors) for stem, tensors in parts.items() for file in plan[stem]]
    for (file, tensors), owner in zip(work, owners([file for file, _ in work], parallel.world), strict=True):
        whole = {}
        for name in file.tensors:
            tensor = gather(tensors[name], owner)
            if parallel.rank == owner and tensor is not None:
                whole[name] = tensor.to("cpu", copy=copy).contiguous()
        if parallel.rank == owner:
            visit(file.name, whole)


def largest_share(plan: Mapping[str, Sequence[TensorFile]], world: int) -> int:
    files = [file for part in plan.values() for file in part]
    shares = [0] * world
    for file, owner in zip(files, owners(files, world), strict=True):
        shares[owner] += file.num_bytes
    return max(shares)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file, with the checksums of its tensors in its header, and flush it. Raises OSError."""
    checksums = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})
    try:
        save_file(tensors, path, metadata={"format": "pt", CHECKSUMS: checksums})
    except SafetensorError as error:  # raised if the disk is full
        raise OSError(f"{path}: {error}") from error
    _sort_header(path)
    force_to_disk(path)


def _sort_header(path: Path) -> None:
    """Sort the metadata in a file's header, whose order safetensors draws, so that equal runs have equal files."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a CPU tensor's bytes, which finds every change of up to 32 bits in a row."""
    whole = tensor.contiguous()
    size = whole.numel() * whole.element_size()
    # Not by numpy: torch then refuses to resize the storage, which offload does.
    return zlib.crc32((ctypes.c_ubyte * size).from_address(whole.data_ptr())) if size else 0


def indices(plan: Mapping[str, Sequence[TensorFile]]) -> dict[str, str]:
    """Return the texts of each `stem.safetensors.index.json` in Hugging Face's format, for parts of several files.

    A model always has one: readers that load all safetensors files of a folder then skip the optimizer's.
    """
    texts = {}
    for stem, files in plan.items():
        if len(files) > 1 or stem == "model":
            weight_map = {name: file.name for file in files for name in file.tensors}
            index = {"metadata": {"total_size": sum(file.num_bytes for file in files)}, "weight_map": weight_map}
            texts[f"{stem}.safetensors.index.json"] = json.dumps(index, indent=2) + "\n"
    return texts


def raise_together(failure: OSError | None, parallel: Parallel) -> None:
    """Wait for all ranks. If one failed, raise on all: the rank's own error, else the first one's.

    Raises:
        OSError: a rank could not write.
    """
    device = "cpu" if parallel.mesh is None else parallel.mesh.device_type
    failed = torch.zeros(parallel.world, device=device)
    failed[parallel.rank] = float(failure is not None)
    if not parallel.sum(failed).any():
        return
    first = int(failed.argmax())
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.int32, device=device)
    if failure is not None and parallel.rank == first:
        words = str(failure).encode()[:MESSAGE_BYTES]
        message[: len(words)] = torch.tensor(list(words))
    parallel.sum(message)
    if failure is not None:
        raise failure
    raise OSError(f"rank {first}: {bytes(message.tolist()).rstrip(bytes(1)).decode(errors='replace')}")


def find_tensors(folder: Path, stem: str) -> dict[str, Stored]:
    """Return the tensors of a part's files by name, from the files' headers.

    Raises:
        FileNotFoundError: there is neither a single file nor an index, or a file of the index is missing.
        ValueError: a file is truncated, or files and index disagree.
    """
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if not index.exists():
        if not single.exists():
            raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}; is it a checkpoint?")
        return {name: Stored(single, shape) for name, shape in read_shapes(single).items()}
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    stored: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        for name, shape in read_shapes(folder / file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{folder / file} holds {name!r}, but {index.name} does not say so")
            stored[name] = Stored(folder / file, shape)
    if lost := sorted(set(weight_map) - set(stored)):
        raise ValueError(f"{folder / weight_map[lost[0]]} does not hold {lost[0]!r}, but {index.name} says so")
    return stored


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors. Raises FileNotFoundError, or ValueError if it is truncated."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file ({error}); use another checkpoint") from error


def read_tensors(stored: Mapping[str, Stored], targets: Mapping[str, Tensor], source: Path) -> None:
    """Copy tensors that `find_tensors` found into `targets`, keeping their devices, dtypes and shards.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape.
        OSError: the disk failed.
    """
    for name, entry in stored.items():
        if name not in targets:
            raise ValueError(f"{source}: tensor {name!r} is not in the model; is this a checkpoint of another model?")
        if entry.shape != tuple(targets[name].shape):
            raise ValueError(f"{source}: {name!r} has shape {[*entry.shape]}, the model's has {[*targets[name].shape]}")
    if missing := sorted(set(targets) - set(stored)):
        raise ValueError(f"{source}: the model's tensor {missing[0]!r} is missing ({len(missing)} in all)")
    read_slices({entry.file for entry in stored.values()}, {n: t.detach() for n, t in targets.items()}, source)


def read_slices(files: Iterable[Path], targets: dict[str, Tensor], source: Path) -> None:
    """Fill `targets` from `files` with torch's distributed checkpoint reader; each rank reads only its slices."""
    # Most runs never load a checkpoint, and this takes a second to import.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    class Listed(FileSystem):
        def ls(self, path: str | os.PathLike[str]) -> list[str]:
            return sorted(map(str, files))

    reader = HuggingFaceStorageReader(str(source))
    reader.fs = Listed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            # Each rank alone: coordinated reading would exchange pickles, and ranks read different tensors anyway.
            load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # no subclass of Exception
            raise OSError(f"{source} could not be read: {error}") from error
