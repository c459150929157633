"""Offload: a learner's states leave their device while something else needs the room, and come back when asked for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from r1_core.learner.parallel import reshard


@dataclass(frozen=True, slots=True)
class Offload:
    """Which states are with the processor while nobody computes with them; `Offload()`: none.

    Weights and optimizer states leave for the time in which an engine samples (`offload`), the optimizer's before
    the weights' own; the reference leaves whenever a verb has used it.
    """

    weights: bool = False
    optimizer: bool = False
    reference: bool = False


class Movable:
    """Tensors that are on their device or, byte by byte, in the processor's memory, page-locked for a GPU.

    A tensor stays the object that it is, and so does what others hold of its memory: the optimizer's references, the
    flat views that FSDP2 gathers from, tied weights. While the bytes are away a storage has none, so nothing may read
    it: the learner fetches before every verb. NOT RUN ON A GPU; on processors it is the same code without page locks.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]]) -> None:
        """Take what finds the tensors, which is called whenever they are to leave."""
        self._find = find
        self._away: list[tuple[UntypedStorage, Tensor]] = []
        self._hosts: dict[int, Tensor] = {}  # a storage's place with the processor, made once

    @torch.no_grad()
    def leave(self) -> None:
        """Copy all bytes to the processor's memory and free the device's; nothing if they are there already."""
        if self._away:
            return
        storages = distinct_storages(self._find())
        self._hosts = {one._cdata: self._place(one) for one in storages}
        self._away = [(one, self._hosts[one._cdata]) for one in storages]
        for storage, host in self._away:
            host.copy_(_bytes_of(storage), non_blocking=True)
        _wait(storages)
        for storage in storages:
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in storages):
            torch.cuda.empty_cache()  # torch would keep the room for itself

    def _place(self, storage: UntypedStorage) -> Tensor:
        known = self._hosts.get(storage._cdata)
        if known is not None and len(known) == storage.nbytes():
            return known
        return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")

    @torch.no_grad()
    def fetch(self) -> None:
        """Bring all bytes back; nothing if they are on the device."""
        for storage, host in self._away:
            storage.resize_(len(host))
            _bytes_of(storage).copy_(host, non_blocking=True)
        _wait([storage for storage, _ in self._away])
        self._away = []


class Residence:
    """Where each state of a learner is, by its owner: the policy, the reference, the optimizer."""

    def __init__(self, offload: Offload, policy: nn.Module, reference: nn.Module | None, optimizer: Optimizer) -> None:
        self._movable: dict[int, Movable] = {}
        if offload.weights:
            self._movable[id(policy)] = Movable(lambda: tensors_of(policy))
        if offload.optimizer:
            self._movable[id(optimizer)] = Movable(lambda: states_of(optimizer))
        if offload.reference and reference is not None:
            self._movable[id(reference)] = Movable(lambda: tensors_of(reference))

    def moves(self, owner: nn.Module | Optimizer) -> bool:
        """Whether the states of this one are offloaded."""
        return id(owner) in self._movable

    def fetch(self, *owners: nn.Module | Optimizer | None) -> None:
        """See to it that the states of these are on the device."""
        for owner in owners:
            if (movable := self._movable.get(id(owner))) is not None:
                movable.fetch()

    def release(self, *owners: nn.Module | Optimizer | None) -> None:
        """Let go of what these need to compute only: whole weights, and states that are offloaded."""
        for owner in owners:
            if isinstance(owner, nn.Module):
                reshard(owner)
            if (movable := self._movable.get(id(owner))) is not None:
                movable.leave()


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model, of sharded ones this rank's part."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield _local(tensor)


def states_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer keeps of its parameters, of sharded ones this rank's part."""
    for state in optimizer.state.values():
        yield from (_local(value) for value in state.values() if isinstance(value, Tensor))


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return what the tensors are kept in, each once however many of them share it."""
    found = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [storage for storage in found.values() if storage.nbytes()]


def bytes_on_device(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes the tensors' storages have now."""
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[UntypedStorage]) -> None:
    """Wait until the devices have done all copies."""
    for device in {storage.device for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
