"""The routers of a mixture of experts, as the learner uses them: replayed, and their load measured."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Routing(Protocol):
    """The attribute `routing` of a model whose routers can be replayed."""

    def replaying(self, choice: Tensor | None, counted: Tensor | None = None) -> AbstractContextManager[None]:
        """Let the routers choose recorded experts inside.

        Args:
            choice: uint8 or int16 [tokens, routers, k], of the flattened input; None: they choose by themselves.
            counted: int64 [T], tokens whose experts are counted; None: none.
        """

    def take_counts(self) -> Tensor | None:
        """Return how many counted tokens chose each expert since the last call, int64 [routers, experts]."""


def measure_load(counts: Tensor) -> dict[str, float]:
    """Return how evenly tokens were distributed over experts.

    Args:
        counts: tokens that chose each expert, [layers, experts].

    Returns:
        `expert_load_max`, the busiest expert's load over the mean load of its layer's experts, of the layer where that
        is largest; `experts_unused`, the share of experts without a token; `expert_load_entropy`, the mean over layers
        of the entropy of loads over that of even loads, 1 if all experts have as many tokens. Nothing without tokens.
    """
    if not int(counts.sum()):
        return {}
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    even = torch.tensor(float(max(2, counts.shape[1]))).double().log()
    return {
        "expert_load_max": float(shares.max()) * counts.shape[1],
        "experts_unused": float((counts == 0).double().mean()),
        "expert_load_entropy": float((torch.special.entr(shares).sum(-1) / even).mean()),
    }
