"""Move weights and optimizer states to host memory while they are not needed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from r1_core.learner.parallel import local_part, reshard

SLAB, SMALLEST = 1 << 30, 1 << 20  # bytes of host memory that are allocated at once, at most and at least


@dataclass(frozen=True, slots=True)
class Offload:
    """Which states move to host memory while nothing computes with them; `Offload()`: none."""

    weights: bool = False
    optimizer: bool = False
    reference: bool = False  # and the teacher


class OffloadableTensors:
    """The tensors that `find` returns, on their device or in host memory (page-locked for a GPU).

    Tensor objects stay the same, so references to them stay valid. While offloaded, a storage has no bytes. NOT RUN ON
    A GPU; on CPU the same code runs without page locks.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]]) -> None:
        self._find = find
        self._away: list[tuple[UntypedStorage, list[Tensor]]] = []  # the bytes of each, in pieces of slabs
        self._slabs: list[Tensor] = []  # uint8, kept while the total stays the same

    @torch.no_grad()
    def offload(self) -> None:
        if self._away:
            return
        storages = distinct_storages(self._find())
        sizes = slab_sizes(sum(storage.nbytes() for storage in storages))
        if sizes != [len(slab) for slab in self._slabs]:
            locked = any(storage.device.type == "cuda" for storage in storages)
            self._slabs = []  # those before are free first
            self._slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=locked) for size in sizes]
        self._away = list(zip(storages, lay(self._slabs, [one.nbytes() for one in storages]), strict=True))
        for storage, pieces in self._away:
            for piece, own in zip(pieces, _bytes_of(storage).split([len(piece) for piece in pieces]), strict=True):
                piece.copy_(own, non_blocking=True)
        _wait(storages)
        for storage in storages:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in storages):
            torch.cuda.empty_cache()  # return the memory from torch's cache

    @torch.no_grad()
    def load(self) -> None:
        for storage, pieces in self._away:
            sizes = [len(piece) for piece in pieces]
            storage.resize_(sum(sizes))
            for piece, own in zip(pieces, _bytes_of(storage).split(sizes), strict=True):
                own.copy_(piece, non_blocking=True)
        _wait([storage for storage, _ in self._away])
        self._away = []


class OffloadManager:
    """Tracks which states of a learner are offloaded, by owner: policy, frozen models, optimizer."""

    def __init__(self, offload: Offload, policy: nn.Module, frozen: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self._movable: dict[int, OffloadableTensors] = {}
        if offload.weights:
            self._movable[id(policy)] = OffloadableTensors(lambda: tensors_of(policy))
        if offload.optimizer:
            self._movable[id(optimizer)] = OffloadableTensors(lambda: states_of(optimizer))
        if offload.reference:
            self._movable |= {id(model): OffloadableTensors(partial(tensors_of, model)) for model in frozen}

    def manages(self, owner: nn.Module | Optimizer) -> bool:
        return id(owner) in self._movable

    def load(self, *owners: nn.Module | Optimizer | None) -> None:
        for owner in owners:
            if (movable := self._movable.get(id(owner))) is not None:
                movable.load()

    def offload(self, *owners: nn.Module | Optimizer | None) -> None:
        """Reshard these models and offload the states that are configured for it."""
        for owner in owners:
            if isinstance(owner, nn.Module):
                reshard(owner)
            if (movable := self._movable.get(id(owner))) is not None:
                movable.offload()


def slab_sizes(total: int) -> list[int]:
    """Return powers of two whose sum is `total`, rounded up by less than `SMALLEST`.

    Torch rounds each page-locked allocation up to a power of two: one for each tensor would take up to twice the bytes.
    """
    whole, rest = divmod(-(-total // SMALLEST) * SMALLEST, SLAB)
    return [SLAB] * whole + [1 << bit for bit in reversed(range(SLAB.bit_length())) if rest >> bit & 1]


def lay(slabs: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Return each size's bytes of the slabs, one after the other; where a slab ends, they go on in the next."""
    left, found = list(slabs), list[list[Tensor]]()
    for size in sizes:
        pieces = list[Tensor]()
        while size:
            piece, rest = left[0][:size], left[0][size:]
            pieces.append(piece)
            size -= len(piece)
            left = [rest, *left[1:]] if len(rest) else left[1:]
        found.append(pieces)
    return found


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield this rank's part of parameters and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield local_part(tensor.detach())


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (local_part(value.detach()) for value in state.values() if isinstance(value, Tensor))


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_on_device(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[UntypedStorage]) -> None:
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
