"""Data parallelism with FSDP2: ranks, meshes, sharding and gathering."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from r1_core.learner.pack import SequenceGroup

REPLICATE, SHARD = "replicate", "shard"  # the dimensions of a mesh, outer first


@dataclass(frozen=True, slots=True)
class Parallel:
    """This process's rank and groups; `Parallel()` is a single process."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None  # over `shard`, or over `replicate` and `shard`
    sequence: SequenceGroup | None = None  # the ranks that share each sequence; None: no sharing

    @classmethod
    def join(
        cls,
        device_type: str,
        *,
        shard_size: int = -1,
        sequence_size: int = 1,
        timeout: timedelta = timedelta(minutes=30),
    ) -> "Parallel":
        """Span the default process group, which must be initialised.

        Args:
            shard_size: how many neighbouring ranks share one copy of the weights; −1: all.
            sequence_size: how many neighbouring ranks share one sequence.
            timeout: of collectives in subgroups.

        Raises:
            ValueError: `shard_size` or `sequence_size` does not divide the number of ranks.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        size = world if shard_size == -1 else shard_size
        if size < 1 or world % size:
            raise ValueError(f"{world} ranks cannot form shards of {shard_size}; it must divide them, or be -1")
        alone = cls(rank, world).with_sequence_size(sequence_size, timeout)
        if size == world:
            return replace(alone, mesh=DeviceMesh.from_group(_all_ranks(), device_type, mesh_dim_names=(SHARD,)))
        ranks = torch.arange(world).view(-1, size)
        # Meshes made by torch have a timeout of 10 minutes, whatever the default group's is.
        groups = [dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0] for rows in (ranks.t(), ranks)]
        return replace(alone, mesh=DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=(REPLICATE, SHARD)))

    @classmethod
    def single_process(cls, device_type: str) -> "Parallel":
        """Span this process only, with a one-rank mesh: the code of many ranks on one device.

        Opens no port. NOT RUN ON A GPU.
        """
        backend = "gloo" if device_type == "cpu" else "nccl"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return cls.join(device_type)

    def with_sequence_size(self, sequence_size: int, timeout: timedelta = timedelta(minutes=30)) -> "Parallel":
        """Return the same ranks with another `sequence_size`, for a second model; a collective call.

        Raises ValueError if `sequence_size` does not divide the number of ranks.
        """
        if sequence_size == self._sequence_size:
            return self
        if sequence_size < 1 or self.world % sequence_size:
            raise ValueError(f"{self.world} ranks cannot share sequences by {sequence_size}; it must divide them")
        sequence = None if sequence_size == 1 else _join_sequence(self.rank, self.world, sequence_size, timeout)
        return replace(self, sequence=sequence)

    @property
    def data_rank(self) -> int:
        return self.rank // self._sequence_size

    @property
    def data_world(self) -> int:
        return self.world // self._sequence_size

    @property
    def _sequence_size(self) -> int:
        return 1 if self.sequence is None else self.sequence.size

    def sum_data(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all data shards, in place; of ranks that share sequences the first counts."""
        if self.sequence is not None and self.sequence.rank > 0:
            tensor.zero_()
        return self.sum(tensor)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def count_collectives(self, device: torch.device) -> dict[str, int]:
        """Return by group how many collectives this process has begun."""
        if self.mesh is None:
            return {}
        groups = [self.mesh.get_group(dimension) for dimension in range(self.mesh.ndim)]
        backends: dict[str, Any] = {group.group_name: group._get_backend(device) for group in groups}
        return {name: backend._get_sequence_number_for_group() for name, backend in backends.items()}

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def _join_sequence(rank: int, world: int, size: int, timeout: timedelta) -> SequenceGroup:
    rows = torch.arange(world).view(-1, size).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)
    return SequenceGroup(rank % size, size, group)


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@dataclass(frozen=True, slots=True)
class Shard:
    """Precision and memory of sharded weights.

    With `offload`, weights, gradients and optimizer states are in host memory, and the default group needs a backend
    for CPU tensors, too: "cpu:gloo,cuda:nccl".
    """

    param_dtype: torch.dtype | None = None  # of matrix products and gathered weights
    reduce_dtype: torch.dtype | None = None  # of gradient sums over ranks
    reshard: bool = True  # gather a block again for backward; otherwise it stays gathered from its forward on
    offload: bool = False


_AS_IT_IS = Shard()


def shard_model(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, shard: Shard = _AS_IT_IS) -> None:
    """Shard a model in place with FSDP2 (arXiv 2304.11277): each of `blocks` by itself, the rest together.

    On a mesh of two dimensions the ranks of the second share one copy. Gradients are summed over ranks, because losses
    are already divided by global counts. Parameters are replaced, so build the optimizer afterwards.

    Arguments of the model and of a vision tower are cast to `param_dtype`; those of layers are not, so that float32
    inputs such as rotary angles keep their precision.
    """
    layers = _layer_names(model)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if shard.offload else OffloadPolicy()

    def precision(cast: bool) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(shard.param_dtype, shard.reduce_dtype, cast_forward_inputs=cast)

    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=shard.reshard,
            mp_policy=precision(cast=type(block).__name__ not in layers),
            offload_policy=offload,
        )
    # The root is needed when backward begins, so torch leaves it gathered.
    fully_shard(model, mesh=mesh, mp_policy=precision(cast=True), offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A factor of 1 alone requests a scaled sum, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard by themselves: the layers in `_no_split_modules`, and each vision or audio tower.

    A tower is one block, because ranks without a picture run it for its collectives only.
    """
    names = _layer_names(model)
    find_tower = getattr(model, "get_encoder", None)
    towers = [] if find_tower is None else [find_tower(modality=kind) for kind in ("image", "audio")]
    towers = [tower for tower in towers if tower is not model]
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # a module comes before its children
        if module not in inside and (module in towers or type(module).__name__ in names):
            blocks.append(module)
            inside.update(module.modules())
    return blocks


def _layer_names(model: nn.Module) -> set[str]:
    return set(getattr(model, "_no_split_modules", None) or ())


def reshard(model: nn.Module) -> None:
    """Reshard the parameters that a forward pass without backward left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def abandon_pass(model: nn.Module) -> None:
    """Free what a pass that raised an error left gathered, so that the next pass starts as all do."""
    if torch.is_grad_enabled():
        model.zero_grad(set_to_none=True)  # of gathered weights, which would enter the next pass
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):
        model.reset_iter_state()  # torch 2.13: otherwise the next backward pass would end half-way
    reshard(model)


class SkippedCollectives(TorchDispatchMode):
    """Replaces collectives of this process by zeros: the first `counts[name]` of each process group."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        super().__init__()
        self._left = dict(counts)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        group = _group_name(args) if function.namespace == "c10d" else None
        if group is None or self._left.get(group, 0) == 0:
            return function(*args, **(kwargs or {}))
        self._left[group] -= 1
        for result in tree_leaves(args[0]):
            result.zero_()
        return args[0], FakeWork().boxed()


def _group_name(args: tuple[Any, ...]) -> str | None:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).group_name
    return None


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by state-dict name, tied ones once; sharded ones as DTensors."""
    yield from model.named_parameters()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict().items():
        if name not in parameters:
            yield name, value


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor (all ranks must call it); return other tensors as they are."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its memory, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor, owner: int) -> Tensor | None:
    """Gather a DTensor on the rank `owner` (None on others); return other tensors as they are.

    All ranks must call it.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard() and tensor.device_mesh.size(dimension) > 1:
            group = tensor.device_mesh.get_group(dimension)
            return _gather_rows(local, len(tensor), owner, group)
    return local


def _gather_rows(local: Tensor, rows: int, owner: int, group: dist.ProcessGroup) -> Tensor | None:
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


def place_like(tensor: Tensor, target: Tensor) -> Tensor:
    """Move a full tensor, which every rank has, to the device, dtype and sharding of `target`."""
    tensor = tensor.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors together, over all ranks (a scalar)."""
    return full_tensor(torch.nn.utils.get_total_norm(tensors))
