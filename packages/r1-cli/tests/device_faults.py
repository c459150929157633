"""What a device check computes in a process of its own: faults of a kernel, and none."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from r1_cli.plan.check.device_steps import check_collectives


def die(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    os._exit(3)


def fail(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def not_a_number(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor([torch.nan]), torch.ones(1).double()


def right(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.ones(1), torch.ones(1).double()


def check_halved_sums(
    device: torch.device, dtype: torch.dtype, rank: int, ranks: int, meeting: str
) -> tuple[Tensor, Tensor]:
    """As `check_collectives`, by ranks whose sums are half of what they are."""
    right = dist.all_reduce

    def wrong(tensor: Tensor) -> None:
        right(tensor)
        tensor /= 2

    dist.all_reduce = wrong
    return check_collectives(device, dtype, rank, ranks, meeting)
