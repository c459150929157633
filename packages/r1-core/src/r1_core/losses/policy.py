"""What a policy loss is, and the log-ratio they share."""

from typing import Protocol

import torch
from torch import Tensor

from r1_core.types import LossInputs

LOG_RATIO_LIMIT = 20.0


class PolicyLoss(Protocol):
    """Per-token losses [B, R] and per-token metrics [B, R] (detached), both 0 where `loss_mask` is false."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]: ...


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / pi_old) for each token [B, R]: 0 outside the mask, clamped to ±20 so that exp stays finite."""
    difference = torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
