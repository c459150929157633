"""Data parallelism: one process, or several that share one model under FSDP2."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True)
class Parallel:
    """Which of how many processes this is; `Parallel()` is the only one."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, device_type: str) -> "Parallel":
        """Span all processes of the default process group, which must have been initialised ("cpu" or "cuda")."""
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        return cls(dist.get_rank(), dist.get_world_size(), mesh)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` up over all processes, in place, and return it."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.mesh is not None:
            dist.barrier(group=self.mesh.get_group())


def shard_model(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Shard a model in place with FSDP2 (arXiv 2304.11277), every block of `blocks` by itself and the rest together.

    Blocks are usually the transformer layers; only one of them is whole in memory at a time. Gradients are summed
    over ranks, not averaged, because the losses are already divided by global counts. Parameters are replaced, so
    build the optimizer afterwards.
    """
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 alone asks gloo for a scaled sum, which it does not have.
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Put the parameters that a forward pass without backward left whole back into shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a shard (all ranks must call it), or the tensor itself."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor, owner: int) -> Tensor | None:
    """The full tensor behind a shard for the rank `owner` alone, which has one copy of it; None on others.

    All ranks must call it, though only those take part that share a copy of the weights with `owner`. A tensor that
    is not sharded is returned as it is.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            group = tensor.device_mesh.get_group(dimension)
            return _gather_rows(local, len(tensor), owner, group)
    return local


def _gather_rows(local: Tensor, rows: int, owner: int, group: dist.ProcessGroup) -> Tensor | None:
    """The `rows` of which each rank of `group` has its part, cut as `torch.chunk` does, if this rank is `owner`."""
    ranks = dist.get_process_group_ranks(group)
    if owner not in ranks:
        return None
    share = -(-rows // len(ranks))
    if len(local) < share:  # all must send the same shape
        local = torch.cat([local, local.new_empty(share - len(local), *local.shape[1:])])
    if dist.get_rank() != owner:
        dist.gather(local.contiguous(), dst=owner, group=group)
        return None
    full = local.new_empty(share * len(ranks), *local.shape[1:])
    dist.gather(local.contiguous(), list(full.split(share)), dst=owner, group=group)
    return full[:rows]


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """Place a full tensor, which every rank has, as `target` is placed: same device, dtype and sharding."""
    tensor = tensor.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, over all ranks (a scalar)."""
    return whole(torch.nn.utils.get_total_norm(tensors))
