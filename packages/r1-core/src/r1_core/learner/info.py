"""What a driver has to know of a learner and cannot look up where the learner computes on another machine."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """A learner in numbers.

    Example: `LearnerInfo(parameters=494_032_768, flops_per_token=2.96e9, device="NVIDIA H200",
    peak_allocated=2 * 10**10, peak_reserved=3 * 10**10)`.
    """

    parameters: int
    flops_per_token: float  # of a training token, forward and backward
    device: str  # as its maker calls it; "cpu" for processors
    peak_allocated: int | None  # bytes of the device's memory that tensors have taken at most; None on processors
    peak_reserved: int | None  # the same with what torch kept for tensors to come
    devices: int = 1  # of this kind, which train together
    tokens: tuple[int, ...] = ()  # of a step's updates, on each rank that has samples of its own
    share_prompts: bool = False  # whether a micro-batch has a prompt once, and not with every answer
    micro_batch: int = 1  # full sequences that one of an update has room for
    straggler: float = 1.0  # tokens of the fullest device to those of the mean one, round by round of a step's updates


def describe(model: nn.Module, device: torch.device) -> LearnerInfo:
    """Describe a model that trains on `device`."""
    on_gpu = device.type == "cuda"
    return LearnerInfo(
        parameters=sum(p.numel() for p in model.parameters()),
        flops_per_token=flops_per_token(model),
        device=torch.cuda.get_device_name(device) if on_gpu else device.type,
        peak_allocated=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        peak_reserved=torch.cuda.max_memory_reserved(device) if on_gpu else None,
    )


def flops_per_token(model: nn.Module) -> float:
    """Return the FLOPs of one token's forward and backward pass, 6 per weight (arXiv 2001.08361).

    Two of the six are the weight's own gradient, which a frozen one is spared. Embedding tables are looked up, not
    multiplied, and attention's own products are left out, so this is a lower bound.
    """
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    multiplied = [p for p in model.parameters() if id(p) not in looked_up]
    return float(sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied))
