"""Patch embeddings as matrix products: a convolution that is given one patch at a time multiplies it by one matrix.

Torch's convolutions are made for large pictures. On a batch of inputs as small as the kernel, which is how Hugging
Face's vision towers call theirs, they take several times as long as the product.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class PatchEmbedding(nn.Conv3d):
    """Computes what its parent does."""

    def forward(self, patches: Tensor) -> Tensor:
        """From [N, channels, *kernel] to [N, out, 1, 1, 1] by one product; other inputs go to the parent."""
        if patches.ndim != 5 or tuple(patches.shape[2:]) != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def multiply_patches(model: nn.Module) -> None:
    """Let the model's patch embeddings multiply; their parameters and results stay what they are."""
    for module in model.modules():
        if type(module) is nn.Conv3d and _is_plain(module):
            module.__class__ = PatchEmbedding


def _is_plain(module: Any) -> bool:
    return module.groups == 1 and set(module.dilation) == {1} and module.padding == (0, 0, 0)
