"""The loss of a critic: squared error with PPO's clip around the old values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import check_not_negative
from r1_core.types import check_mask, check_tensors


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """max((V − G)², (clip(V, V_old − clip, V_old + clip) − G)²) / 2, V the values and G the returns.

    From the code released with arXiv 1707.06347 (not in the paper). `clip` None: no clip.
    """

    clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_not_negative(clip=self.clip)

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses and the metrics `vf_clipfrac` and `vpred_mean`; all tensors are [B, R]."""
        given = {"values": values, "old_values": old_values, "returns": returns, "loss_mask": loss_mask}
        check_tensors("ValueLoss", "[B, R]", **given)
        check_mask("ValueLoss", loss_mask)
        values, old_values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, old_values, returns))
        losses = (values - returns).square()
        held = torch.zeros_like(loss_mask)
        if self.clip is not None:
            near = values.clamp(old_values - self.clip, old_values + self.clip)
            clipped = (near - returns).square()
            held = clipped > losses
            losses = torch.maximum(losses, clipped)
        return 0.5 * losses, {"vf_clipfrac": held.to(values.dtype), "vpred_mean": values.detach()}


@dataclass(frozen=True, slots=True)
class WeightedValue:
    """−G·V: the returns G are what the values V shall rise by, such as the slopes of a loss of whole samples' values.

    See `r1_core.reward_model`.
    """

    def __call__(
        self, values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        given = {"values": values, "old_values": old_values, "returns": returns, "loss_mask": loss_mask}
        check_tensors("WeightedValue", "[B, R]", **given)
        check_mask("WeightedValue", loss_mask)
        values, returns = (torch.where(loss_mask, x, 0.0) for x in (values, returns))
        return -returns * values, {"vpred_mean": values.detach()}
