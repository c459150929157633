"""The base class of policy losses, what they share (log-ratios, row means, the clipped surrogate), and aggregation.

An aggregation reduces per-token values to one number, divided by the token and sequence counts of the whole optimizer
step. It returns a micro-batch's part of the step's mean. The parts of all micro-batches and ranks add up to that mean,
whatever the micro-batch size. Rows without tokens add 0 and are not counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from r1_core.needs import Needs
from r1_core.registry import Registry
from r1_core.settings import check_settings
from r1_core.types import LossInputs, Totals, check_mask, check_tensors

LOG_RATIO_LIMIT = 20.0


class PolicyLoss(ABC):
    """Computes losses [B, R] and metrics by name [B, R] (detached), all 0 where `loss_mask` is false.

    A row is a sequence. A loss with one value per sequence repeats it on each of the sequence's tokens; aggregate it
    with `seq`. A subclass is a dataclass whose fields are its settings; a setting outside the range of its type raises
    ValueError.

    `names` are its names in a configuration, `formula` is LaTeX for the documentation, `needs` what must be computed
    before any gradient, `aggregation` its default. `token_wise`: no token's loss depends on another token's log-prob
    or entropy (`selected` is given), so the gradient can be computed while the token's logits are in memory.
    """

    names: ClassVar[tuple[str, ...]] = ()
    formula: ClassVar[str] = ""
    needs: ClassVar[Needs] = ()
    token_wise: ClassVar[bool] = False
    aggregation: ClassVar[str] = "token"

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]: ...


@runtime_checkable
class SelectingLoss(Protocol):
    """A policy loss that treats some tokens differently, selected among all M trained tokens of the optimizer step."""

    def select(self, advantages: Tensor, logprobs: Tensor) -> Tensor:
        """Return which tokens are selected, bool [M], given their advantages [M] and log-probs [M]."""
        ...


def token_gap(inputs: LossInputs) -> Tensor:
    """Return log(pi / pi_old) of each token [B, R], not clamped; 0 outside the mask."""
    return torch.where(inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, 0.0)


def log_ratio(inputs: LossInputs) -> Tensor:
    """Return log(pi / pi_old) of each token [B, R], clamped to ±20 so that exp stays finite; 0 outside the mask."""
    return token_gap(inputs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def masked_advantages(inputs: LossInputs) -> Tensor:
    return torch.where(inputs.loss_mask, inputs.advantages, 0.0)


def masked_logprobs(inputs: LossInputs) -> Tensor:
    return torch.where(inputs.loss_mask, inputs.logprobs, 0.0)


def choose(where: Tensor, value: float, other: float, dtype: torch.dtype) -> Tensor:
    """Select one of two numbers per element, in `dtype`; `torch.where` would give float32."""
    return torch.full(where.shape, other, dtype=dtype, device=where.device).masked_fill_(where, value)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's trained tokens [B, 1], 0 if there are none. `values` are 0 outside `mask`."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    change: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high)), and at most −A·clip_dual where A < 0.

    `change` [B, R] is log(ratio). Returns losses and the metrics `ppo_kl` (log(pi_old / pi), whose mean estimates the
    divergence from the sampling policy), `pg_clipfrac_higher` (tokens clipped) and `pg_clipfrac_lower` (tokens at the
    dual clip), each [B, R].
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


def off_policy_weights(inputs: LossInputs, threshold: float) -> Tensor:
    """Return 0 where A < 0 and the row's mean log(pi_old / pi) exceeds `threshold`, else 1, [B, R].

    Off-policy sequence masking (arXiv 2512.02556): drops bad answers that the policy has already moved away from. Their
    tokens still count in the mean.
    """
    distance = -row_mean(token_gap(inputs).detach(), inputs.loss_mask)
    dropped = (inputs.advantages < 0) & (distance > threshold)
    return (~dropped).to(inputs.logprobs.dtype)


def check_not_negative(**settings: float) -> None:
    for name, value in settings.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must not be negative")


# Takes values [B, R], which are 0 outside the mask [B, R], and the step's totals; gives a scalar, linear in values.
Aggregation = Callable[[Tensor, Tensor, Totals], Tensor]


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / tokens: every token of the step weighs the same (DAPO, arXiv 2503.14476).

    BNPO divides by the tokens of the current batch; here that batch is always the whole step, so both are the same.
    """
    return values.sum() / max(totals.tokens, 1)


def sequence_mean_of_means(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ over rows (Σ values / row's tokens) / sequences: every sequence weighs the same (arXiv 2402.03300)."""
    return (values.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(totals.sequences, 1)


def sequence_mean_of_sums(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / sequences: token log-probs are summed, not averaged, so long answers weigh more."""
    return values.sum() / max(totals.sequences, 1)


def fixed_length(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Σ values / (sequences · length): divides by a constant, not by each row's length (Dr.GRPO, arXiv 2503.20783).

    The length is `totals.length`, usually the maximum response length.
    """
    return values.sum() / (max(totals.sequences, 1) * max(totals.length, 1))


AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation",
    {
        "token": token_mean,
        "seq": sequence_mean_of_means,
        "token-mean": token_mean,
        "seq-mean-token-mean": sequence_mean_of_means,
        "seq-mean-token-sum": sequence_mean_of_sums,
        "seq-mean-token-sum-norm": fixed_length,
    },
)


def aggregate(values: Tensor, mask: Tensor, mode: str, totals: Totals) -> Tensor:
    """Sum `values` [B, R] under `mask` [B, R] into this micro-batch's part of the step's mean (a scalar).

    `mode` is a name of AGGREGATIONS; another one raises ValueError. Values outside the mask are ignored.
    """
    check_tensors("aggregate", "[B, R]", values=values, mask=mask)
    check_mask("aggregate", mask)
    return AGGREGATIONS.get(mode)(torch.where(mask, values, 0.0), mask, totals)
