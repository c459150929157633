"""What a policy loss is, and the pieces that the losses share: log-ratios, row means, the clipped surrogate."""

from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from r1_core.needs import Needs
from r1_core.settings import check_settings
from r1_core.types import LossInputs

LOG_RATIO_LIMIT = 20.0


class PolicyLoss(Protocol):
    """Per-token losses [B, R] and per-token metrics [B, R] (detached), both 0 where `loss_mask` is false.

    A row is a whole sequence. A loss that is one number per sequence puts that number on each of its tokens, so that
    the mean over sequences of token means (`seq`) gives the mean over sequences.

    A loss says of itself, beside its `names` in a configuration: what it `needs` before any gradient; `token_wise`,
    that a token's loss depends on no other token's log-prob or entropy (`selected` is given), so that its gradient can
    be taken while the token's logits are there; and the `aggregation` that it is meant for. A dataclass that inherits
    from this class refuses settings outside the ranges of their types.
    """

    names: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Needs] = ()
    token_wise: ClassVar[bool] = False
    aggregation: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]: ...


@runtime_checkable
class SelectingLoss(Protocol):
    """A policy loss that treats some tokens apart, chosen among all the M trained tokens of the optimizer step."""

    def select(self, advantages: Tensor, logprobs: Tensor) -> Tensor:
        """Return which tokens are chosen, bool [M], from their advantages [M] and log-probs [M]."""
        ...


def token_gap(inputs: LossInputs) -> Tensor:
    """log(pi / pi_old) for each token [B, R]: 0 outside the mask, not clamped."""
    return torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / pi_old) for each token [B, R]: 0 outside the mask, clamped to ±20 so that exp stays finite."""
    return token_gap(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_advantages(inputs: LossInputs) -> Tensor:
    """The advantages [B, R], 0 outside the mask."""
    return torch.where(inputs.loss_mask, inputs.advantages, 0.0)


def masked_logprobs(inputs: LossInputs) -> Tensor:
    """The log-probs [B, R], 0 outside the mask."""
    return torch.where(inputs.loss_mask, inputs.logprobs, 0.0)


def choose(where: Tensor, value: float, other: float, dtype: torch.dtype) -> Tensor:
    """One of two settings for each element, [B, R] in `dtype`; `torch.where` of two numbers would give float32."""
    return torch.full(where.shape, other, dtype=dtype, device=where.device).masked_fill_(where, value)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row's trained tokens [B, 1]; 0 for a row that has none. `values` is 0 outside `mask`."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    change: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high)), and at most −A·clip_dual where A < 0.

    `change` [B, R] is the logarithm of the ratio. Returns losses [B, R] and the metrics `ppo_kl`,
    `pg_clipfrac_higher` (tokens held by the ratio clip) and `pg_clipfrac_lower` (by the dual clip), each [B, R];
    `ppo_kl` is log(pi_old / pi), whose mean estimates the distance from the policy that sampled.
    """
    ratio = change.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_dual
    bounded = (advantages < 0) & (pessimistic > bound)
    metrics = {
        "ppo_kl": -change.detach(),
        "pg_clipfrac_higher": (clipped > plain).to(change.dtype),
        "pg_clipfrac_lower": bounded.to(change.dtype),
    }
    return torch.where(bounded, bound, pessimistic), metrics


def check_not_negative(**settings: float) -> None:
    """Raise ValueError, naming the setting, if one is below 0 or NaN."""
    for name, value in settings.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
