"""Float32 sums of the gradients of micro-batches, for weights whose own gradients have fewer digits."""

import torch
from torch import Tensor, nn

NARROW = (torch.bfloat16, torch.float16)


class GradientSums:
    """Adds up in float32 what a backward pass would add to `grad` in bfloat16.

    A bfloat16 has 8 digits: of 64 equal micro-batches the later ones would be rounded off, some of them wholly. Here
    each is added in float32, and the sum is rounded once. This takes 4 bytes for each trained bfloat16 (or float16)
    weight from the second micro-batch of an optimizer step to its last; one micro-batch takes nothing. Sharded
    weights (DTensor) are added up shard by shard.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad and param.dtype in NARROW]
        self._sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def collect(self) -> None:
        """Take the gradients that are there; call it before the backward pass of each micro-batch but the first."""
        for param in self._params:
            if param.grad is None:
                continue
            if param in self._sums:
                self._sums[param].add_(param.grad)
            else:
                self._sums[param] = param.grad.float()
            param.grad = None

    @torch.no_grad()
    def deliver(self) -> None:
        """Give every parameter its sum as its gradient; call it after the last micro-batch."""
        if not self._sums:
            return
        self.collect()
        for param, total in self._sums.items():
            param.grad = total.to(param.dtype)
        self._sums.clear()
