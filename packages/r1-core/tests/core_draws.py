"""Random small inputs for the property tests: ragged rows, masks with holes, groups of any size in any order."""

import math
from dataclasses import fields, replace

import torch
from hypothesis import settings
from torch import Tensor
from torch.nn.functional import pad

from r1_core.advantages import AdvantageInputs
from r1_core.losses.policy import PolicyLoss, SelectingLoss
from r1_core.types import LossInputs, Totals

few = settings(max_examples=12)

# What fills a new cell of each tensor when rows or columns are added.
FILLERS = {"token_rewards": 0.0, "loss_mask": False, "selected": False, "turns": -1, "states": 0}


def masked_batch(seed: int, rows: int, width: int) -> tuple[Tensor, torch.Generator]:
    """A mask [rows, width] of unequal rows with holes, one row of it all true, and the generator to go on with."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask &= torch.rand(mask.shape, generator=generator) < 0.7
    mask[:1] = True
    return mask, generator


def advantage_inputs(seed: int, rewards: Tensor | None = None, groups: Tensor | None = None) -> AdvantageInputs:
    """Up to eight answers in up to three groups, every optional field given but the penalties, NaN off the mask."""
    rows = len(rewards) if rewards is not None else 1 + seed % 8
    mask, generator = masked_batch(seed, rows, 6)
    mask[~mask.any(-1), 0] = True
    uniform = torch.rand(rows, 6, 5, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 3, (rows,), generator=generator) if groups is None else groups
    rewards = uniform[:, 0, 0] if rewards is None else rewards
    hidden = torch.where(mask, 0.0, math.nan)
    probs = uniform[..., 2]
    return AdvantageInputs(
        torch.where(mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True)), rewards[:, None], 0.0),
        groups,
        mask,
        values=uniform[..., 1] + hidden,
        baselines=0.5 + 0.1 * groups.double(),
        old_logprobs=probs.log() + hidden,
        squared_probs=probs.square() + uniform[..., 3] * (1 - probs).square() + hidden,
        correction_weights=uniform[..., 4] + hidden,
        parts=torch.stack([rewards, uniform[:, 1, 4]], -1),
        turns=torch.where(mask, torch.arange(6) // 2, -1),
        states=torch.where(mask, (2 * uniform[:, torch.arange(6) // 2, 4]).long(), 0),
    )


def loss_inputs(seed: int, rows: int = 4, width: int = 5, spread: float = 0.4) -> LossInputs:
    """Float64 rows with holes, the log-probs a leaf, `totals` those of these rows alone."""
    mask, generator = masked_batch(seed, rows, width)

    def draw() -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64)

    old = -draw().abs() - 0.1
    return LossInputs(
        logprobs=(old + spread * draw()).clamp(max=-1e-3).requires_grad_(),
        loss_mask=mask,
        advantages=draw(),
        old_logprobs=old,
        totals=Totals(int(mask.sum()), int(mask.any(-1).sum()), length=8),
        ref_logprobs=old + 0.2 * draw(),
        entropy=draw().abs(),
        weights=draw().abs(),
    )


def select(loss: PolicyLoss, inputs: LossInputs) -> LossInputs:
    """The inputs with the tokens chosen, as `Objective.prepare` does it for a whole step."""
    if not isinstance(loss, SelectingLoss):
        return inputs
    mask = inputs.loss_mask
    chosen = loss.select(inputs.advantages[mask], inputs.old_logprobs[mask])
    return replace(inputs, selected=torch.zeros_like(mask).masked_scatter(mask, chosen))


def take(inputs, rows):
    """The same inputs with these rows in this order."""
    return _each(inputs, lambda name, value: value[rows])


def enlarge(inputs, rows: int = 0, columns: int = 0):
    """The same inputs with rows below and columns on the right that nobody trains, NaN in them, groups of their own."""

    def grow(name: str, value: Tensor) -> Tensor:
        if name == "parts":
            return pad(value, (0, 0, 0, rows))
        if value.ndim == 1:
            return torch.cat([value, 1000 + torch.arange(rows, dtype=value.dtype)])
        return pad(value, (0, columns, 0, rows), value=FILLERS.get(name, math.nan))

    return _each(inputs, grow)


def close_gaps(inputs):
    """The same inputs with the trained tokens of each row moved to the left."""
    return _each(inputs, lambda name, value: move_left(value, inputs.loss_mask) if value.ndim == 2 else value)


def move_left(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        return values
    return values.gather(1, (~mask).byte().argsort(dim=1, stable=True))


def _each(inputs, change):
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(
        inputs, **{name: change(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)}
    )
