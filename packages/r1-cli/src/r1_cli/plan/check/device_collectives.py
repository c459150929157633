"""The collectives by which ranks share weights and gradients, against sums and copies on the CPU."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

SIZE = 1 << 20  # numbers of a rank: enough for the path by which large messages go
SECONDS = 100.0  # for a collective: between some GPUs they hang where direct access is forbidden


def check_collectives(
    device: torch.device, dtype: torch.dtype, rank: int, ranks: int, meeting: str
) -> tuple[Tensor, Tensor]:
    """Sum, gather, scatter sums and broadcast as one of `ranks`; return what this rank has, and what the CPU finds."""
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(ranks, SIZE, generator=draw).to(dtype)  # of all ranks
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.accelerator.set_device_index(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = FileStore(meeting, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS))
    try:
        own, last = parts[rank].to(device), parts[-1].to(device)
        summed = own.clone()
        dist.all_reduce(summed)
        gathered = own.new_empty(ranks * SIZE)
        dist.all_gather_into_tensor(gathered, own)
        scattered = own.new_empty(SIZE // ranks)
        dist.reduce_scatter_tensor(scattered, own[: SIZE // ranks * ranks].clone())
        sent = last if rank == ranks - 1 else torch.zeros_like(last)
        dist.broadcast(sent, ranks - 1)
        found = torch.cat([summed, gathered, scattered, sent]).double().cpu()
    finally:
        dist.destroy_process_group()
    total, whole = parts.double().sum(0), parts.double()
    share = total[: SIZE // ranks * ranks].view(ranks, -1)[rank]
    return found, torch.cat([total, whole.flatten(), share, whole[-1]])
