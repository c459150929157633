"""Read the sharded checkpoints of EasyR1 and veRL: one file of pickled tensors per FSDP rank.

Each of W ranks has `model_world_size_{W}_rank_{r}.pt`, a state dict of DTensors (FSDP2, or FSDP1 with a device mesh),
ShardedTensors (FSDP1 without one) and plain tensors. No code in a file is executed: torch's restricted unpickler reads
plain records in place of torch's distributed classes.
"""

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class ShardError(ValueError):
    """Sharded files that cannot be joined; the message names the file or tensor and what to do."""


class _Record:
    """Stands for a class that is not imported, and has its fields."""

    def __new__(cls, *args: object) -> "_Record":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) else (state,)  # of a class with slots: (fields or None, slots)
        for fields in parts:
            self.__dict__.update(fields if isinstance(fields, dict) else {})


class _Split(_Record):
    """Stands for a DTensor's placement `Shard`: split over ranks along `dim`."""

    dim: int


class _Replicated(_Record):
    """Stands for a DTensor's placement `Replicate`."""


class _Distributed(Tensor):
    """Stands for DTensor and ShardedTensor: `shape` is the whole tensor's, `state` the class's pickled state."""

    state: Any

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor whose shards are not joined yet")

    def __setstate__(self, state: object) -> None:
        self.state = state


def _attribute(owner: object, name: str) -> type[_Record]:
    """Stands for `getattr`, by which pickles name enum members and nested classes."""
    return _Record


def _stand_ins() -> list[tuple[object, str]]:
    """Return the classes that a file may name besides plain tensors, with replacements.

    Their modules differ between versions of torch; 2.4 and newer are covered.
    """
    new, old = "torch.distributed.tensor", "torch.distributed._tensor"
    sharded, spec = "torch.distributed._shard.sharded_tensor", "torch.distributed._shard.sharding_spec"
    tensors = (f"{new}.DTensor", f"{new}._api.DTensor", f"{old}.api.DTensor", f"{sharded}.api.ShardedTensor")
    ignored = [
        *(f"{room}._dtensor_spec.{name}" for room in (new, old) for name in ("DTensorSpec", "TensorMeta")),
        *(f"{old}.placement_types.{name}" for name in ("DTensorSpec", "TensorMeta")),
        f"{new}._dtensor_spec.ShardOrderEntry",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed.remote_device._remote_device",
        "torch.distributed._shard.metadata.ShardMetadata",
        f"{spec}.chunk_sharding_spec.ChunkShardingSpec",
        f"{spec}.api.EnumerableShardingSpec",
        f"{sharded}.shard.Shard",
        f"{sharded}.api.ShardedTensor.ProcessGroupState",
        *(f"{sharded}.metadata.{n}" for n in ("ShardedTensorMetadata", "TensorProperties", "MEM_FORMAT_ENCODING")),
    ]
    return [
        *((_Distributed, name) for name in tensors),
        *((_Split, f"{room}.placement_types.Shard") for room in (new, old)),
        *((_Replicated, f"{room}.placement_types.Replicate") for room in (new, old)),
        *((_Record, name) for name in ignored),
        (_attribute, "builtins.getattr"),
    ]


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Allow only `_stand_ins` inside the block, not the classes that importing DTensor registers."""
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals(_stand_ins())  # type: ignore[arg-type]  # pairs are taken, too
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def find_shards(folder: Path) -> list[Path]:
    """Return the files of a sharded model by rank; an empty list if the folder has none.

    Raises:
        ShardError: a rank's file is missing, or there are files of several world sizes.
    """
    found = {(int(m[1]), int(m[2])): file for file in folder.glob("*.pt") if (m := _FILE.fullmatch(file.name))}
    worlds = sorted({world for world, _ in found})
    if not worlds:
        return []
    if len(worlds) > 1:
        raise ShardError(f"{folder} holds shards of several world sizes ({worlds}): leave those of one")
    missing = [rank for rank in range(worlds[0]) if (worlds[0], rank) not in found]
    if missing:
        names = ", ".join(f"model_world_size_{worlds[0]}_rank_{rank}.pt" for rank in missing[:5])
        raise ShardError(f"{folder}: {len(missing)} of {worlds[0]} shards are missing ({names}): copy them there")
    return [found[worlds[0], rank] for rank in range(worlds[0])]


def read_shards(files: Sequence[Path]) -> dict[str, Tensor]:
    """Return the whole tensors of a sharded model by name, in the files' dtype, in host memory.

    Args:
        files: one per rank, in order, as from `find_shards`.

    Raises:
        ShardError: a file is damaged, names other classes, or the shards do not make whole tensors.
    """
    with _only_stand_ins():
        ranks = [_read(file) for file in files]
    for file, state in zip(files, ranks, strict=True):
        if odd := sorted(state.keys() ^ ranks[0].keys()):
            raise ShardError(f"{file} and {files[0].name} do not hold the same tensors, {odd[0]} is in one only")
    return {name: _join(f"{files[0].parent}: {name}", [state[name] for state in ranks]) for name in ranks[0]}


def _read(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise ShardError(
            f"{file} is refused: its pickle names {name[1].rstrip('.') if name else 'an object'}, which is no tensor. "
            "Nothing in it was executed; if you trust the file, merge it with the trainer that wrote it"
        ) from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ShardError(
            f"{file} cannot be read ({str(error).splitlines()[0]}): it is cut off or no file of torch"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ShardError(f"{file} holds no state dict of tensors")
    return state


def _join(name: str, parts: list[Any]) -> Tensor:
    kinds = {type(part) for part in parts}
    if kinds == {_Distributed}:
        shape = [*parts[0].shape]
        dim, pieces = _pieces_of_dtensor(name, parts) if _is_dtensor(parts[0]) else (0, _pieces_by_offset(parts))
        size = 0
        needed: list[Tensor] = []
        for piece in pieces:  # with replicas the first ranks hold one copy, the others further ones
            if size < shape[dim] or not needed:
                needed.append(piece)
                size += piece.shape[dim] if piece.ndim else 0
        whole = torch.cat(needed, dim) if len(needed) > 1 else needed[0].clone()
        if [*whole.shape] != shape:
            raise ShardError(f"{name}: the shards make {[*whole.shape]}, the tensor is {shape}")
        return whole.contiguous()
    if kinds != {Tensor} or any(not torch.equal(parts[0], part) for part in parts[1:]):
        raise ShardError(f"{name} differs between ranks and says nothing of how it is split")
    return parts[0].clone().contiguous()


def _is_dtensor(part: Any) -> bool:
    return isinstance(part.state[-1], dict) and "_local_tensor" in part.state[-1]


def _pieces_of_dtensor(name: str, parts: list[Any]) -> tuple[int, list[Tensor]]:
    """Return the dimension to join the ranks' tensors along, and the tensors. Raises ShardError."""
    placements = parts[0].state[-1]["_spec"].placements
    if any(isinstance(placement, _Split) for placement in placements[:-1]):
        raise ShardError(f"{name} is split by tensor parallelism as well as by FSDP: merge it where it was trained")
    pieces = [part.state[-1]["_local_tensor"] for part in parts]
    return (placements[-1].dim, pieces) if isinstance(placements[-1], _Split) else (0, pieces[:1])


def _pieces_by_offset(parts: list[Any]) -> list[Tensor]:
    shards = [shard for part in parts for shard in part.state[0]]
    return [piece for _, piece in sorted({s.metadata.shard_offsets[0]: s.tensor for s in shards}.items())]
