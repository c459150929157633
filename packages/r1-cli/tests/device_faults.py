"""What a device check computes in a process of its own: faults of a kernel, and none."""

import os

import torch
from torch import Tensor


def die(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    os._exit(3)


def fail(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


def not_a_number(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor([torch.nan]), torch.ones(1).double()


def right(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.ones(1), torch.ones(1).double()
