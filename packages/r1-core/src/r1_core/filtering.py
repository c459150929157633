"""Which groups are worth training on: dynamic sampling by mean, by variance, or by a moving average of the std.

Mean range: low < mean of the group < high. arXiv 2503.14476 (DAPO) equation 11, there with right and wrong answers.
Zero variance: the rewards of the group differ, so that some advantage is not zero.
EMA-std: std of the group ≥ beta · E, with E an average over past steps. arXiv 2506.18254 (RLPR) section 3.3.

A filter gives bool [N], true on the samples of groups to keep. Groups come in any size and order; one with a reward
that is not finite is dropped.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r1_core.advantages.groups import group_statistics


@dataclass(frozen=True, slots=True)
class MeanRange:
    """Keeps groups whose mean lies strictly between `low` and `high`."""

    low: float = 0.01
    high: float = 0.99

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"filter_low is {self.low} and filter_high {self.high}; low must be below high")

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Rewards [N] (any score; DAPO: the accuracy) and group ids [N] to bool [N]."""
        mean = group_statistics(rewards, group_ids).mean
        return (self.low < mean) & (mean < self.high)


@dataclass(frozen=True, slots=True)
class NonzeroVariance:
    """Keeps groups whose rewards are not all the same number; a group of one goes."""

    def keep(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Rewards [N] and group ids [N] to bool [N]."""
        group = group_statistics(rewards, group_ids)
        return ~group.constant & group.mean.isfinite()


@dataclass(frozen=True, slots=True)
class EMAStd:
    """Keeps groups whose std is at least `beta` times the average std of past steps.

    Steps from `ema_start_step` to before `filter_start_step` are averaged plainly; after that each step moves the
    average by 1 − ratio. A step counts once, with all samples it generated before filtering, and is judged by the
    steps before it alone. `average` and `steps_seen` are the state to checkpoint.
    """

    beta: float = 0.5
    ratio: float = 0.99
    ema_start_step: int = 6
    filter_start_step: int = 11
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

    def threshold(self, step: int) -> float | None:
        """The least std that is kept in `step`, or None while everything is."""
        if step < self.filter_start_step or self.average is None:
            return None
        return self.beta * self.average

    def keep(self, rewards: Tensor, group_ids: Tensor, step: int) -> Tensor:
        """Rewards [N] and group ids [N] generated in `step` to bool [N]; a group of one has no std and goes."""
        threshold = self.threshold(step)
        if threshold is None:
            return torch.ones_like(rewards, dtype=torch.bool)
        group = group_statistics(rewards, group_ids)
        return (group.std >= threshold) & (group.size > 1)

    def observe(self, rewards: Tensor, group_ids: Tensor, step: int) -> "EMAStd":
        """Return the filter for the next step, given all rewards [N] that `step` generated, before filtering."""
        if step < self.ema_start_step:
            return self
        group = group_statistics(rewards, group_ids)
        stds = group.std[group.std.isfinite() & (group.size > 1)]
        mean = float(stds.mean()) if stds.numel() else math.nan
        if not math.isfinite(mean):
            return self
        if self.average is None:
            average = mean
        elif step < self.filter_start_step:
            average = self.average + (mean - self.average) / (self.steps_seen + 1)
        else:
            average = (1 - self.ratio) * mean + self.ratio * self.average
        return replace(self, average=average, steps_seen=self.steps_seen + 1)
