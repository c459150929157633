"""Filter groups for dynamic sampling: by mean reward, by variance, or by a moving average of the std.

Mean range: low < mean of the group < high. arXiv 2503.14476 (DAPO), there with right and wrong answers.
Zero variance: the rewards of the group differ, so that some advantage is not zero.
EMA-std: std of the group ≥ beta · E, with E an average over past steps. arXiv 2506.18254 (RLPR).

Groups come in any size and order; one with a reward that is not finite is dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from r1_core.advantages.statistics import check_group, group_statistics


class GroupFilter(Protocol):
    """An immutable filter of a step's groups; `observe` returns the filter of the next step."""

    per_group: ClassVar[bool]  # whether it judges each group by itself, and so may be asked about one at a time

    @property
    def metrics(self) -> dict[str, float]:
        """The thresholds of this step; {} if they never change."""

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Return which samples to keep, bool [N], given rewards and group ids [N] of complete groups."""

    def observe(self, rewards: Tensor, group_ids: Tensor) -> "GroupFilter":
        """Return the next step's filter, given all rewards [N] of this step before filtering."""

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state as JSON values."""

    def resume(self, state: Mapping[str, Any]) -> "GroupFilter":
        """Return the filter with a checkpoint's state; {} is the initial state."""


class Unchanging:
    """Base class of filters without state."""

    __slots__ = ()
    per_group: ClassVar[bool] = True

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def observe(self, rewards: Tensor, group_ids: Tensor) -> Self:
        return self

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, state: Mapping[str, Any]) -> Self:
        return self


class KeepAll(Unchanging):
    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        check_group(rewards, group_ids)
        return torch.ones_like(rewards, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class MeanRange(Unchanging):
    """Keeps groups with a mean strictly between `low` and `high`, of any score (DAPO: the accuracy)."""

    low: float = 0.01
    high: float = 0.99

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"filter_low is {self.low} and filter_high {self.high}; low must be below high")

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        mean = group_statistics(rewards, group_ids).mean
        return (self.low < mean) & (mean < self.high)


@dataclass(frozen=True, slots=True)
class NonzeroVariance(Unchanging):
    """Keeps groups whose rewards differ; drops groups of one."""

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        group = group_statistics(rewards, group_ids)
        return ~group.constant & group.mean.isfinite()


@dataclass(frozen=True, slots=True)
class EMAStd:
    """Keeps groups whose std is at least `beta` times the average std of past steps; drops groups of one.

    Steps count from 1. Steps from `ema_start_step` to before `filter_start_step` enter a plain average; later ones move
    the average by 1 − ratio. A step enters once, with all samples before filtering, and is compared with earlier steps
    only. `never_empty` keeps all groups if none reaches the threshold, as the published code does. Without it, sampling
    never ends once answers have become alike. `step` (the current one), `average` and `steps_seen` are the state.
    """

    per_group: ClassVar[bool] = False  # `never_empty` looks at all groups that it is asked about

    beta: float = 0.5
    ratio: float = 0.99
    ema_start_step: int = 6
    filter_start_step: int = 11
    never_empty: bool = True
    step: int = 1
    average: float | None = None
    steps_seen: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio is {self.ratio}; it must lie in [0, 1]")
        if self.filter_start_step <= self.ema_start_step:
            raise ValueError(
                f"filter_start_step is {self.filter_start_step}; it must come after ema_start_step, "
                f"{self.ema_start_step}, because the threshold needs a step to go by"
            )

    @property
    def threshold(self) -> float | None:
        """The minimum std of this step, or None while every group is kept."""
        if self.step < self.filter_start_step or self.average is None:
            return None
        return self.beta * self.average

    @property
    def metrics(self) -> dict[str, float]:
        found = {"ema_mean": self.average, "ema_threshold": self.threshold}
        return {name: value for name, value in found.items() if value is not None}

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        check_group(rewards, group_ids)
        if self.threshold is None:
            return torch.ones_like(rewards, dtype=torch.bool)
        group = group_statistics(rewards, group_ids)
        kept = (group.std >= self.threshold) & (group.size > 1)
        return group.mean.isfinite() if self.never_empty and not kept.any() else kept

    def observe(self, rewards: Tensor, group_ids: Tensor) -> "EMAStd":
        later = replace(self, step=self.step + 1)
        group = group_statistics(rewards, group_ids)
        stds = group.std[group.std.isfinite() & (group.size > 1)]
        if self.step < self.ema_start_step or not stds.numel():
            return later
        mean = float(stds.mean())
        if self.average is None:
            average = mean
        elif self.step < self.filter_start_step:
            average = self.average + (mean - self.average) / (self.steps_seen + 1)
        else:
            average = (1 - self.ratio) * mean + self.ratio * self.average
        return replace(later, average=average, steps_seen=self.steps_seen + 1)

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "average": self.average, "steps_seen": self.steps_seen}

    def resume(self, state: Mapping[str, Any]) -> "EMAStd":
        return replace(self, **state)
