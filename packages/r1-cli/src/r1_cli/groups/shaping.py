"""From scores to the rewards that an estimator sees: an overlong punishment, one scale over the run, a clip."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from r1_cli.groups.group import Group
from r1_core.reward_normalization import RewardNormalizer
from r1_core.soft_overlong import overlong_punishment


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in tokens of an answer."""

    max_length: int
    buffer: int  # the last tokens before `max_length`, which cost
    factor: float  # what an answer that fills them all loses

    def punishments(self, group: Group) -> list[float]:
        """Return what each answer's reward changes by: 0 or less."""
        lengths = torch.tensor([len(completion.token_ids) for completion in group.completions])
        return overlong_punishment(lengths, self.max_length, self.buffer, self.factor).tolist()

    def punish(self, group: Group) -> Group:
        """Return the group with the punishments in its rewards."""
        rewards = [reward + change for reward, change in zip(group.rewards, self.punishments(group), strict=True)]
        return replace(group, rewards=rewards)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mean punishment of an answer, and the share of answers that have one."""
        changes = [change for group in groups for change in self.punishments(group)]
        return {"overlong/penalty": fmean(changes), "overlong/ratio": fmean(change < 0 for change in changes)}


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is done to rewards, in this order. Where a field is None or false, its part is left out."""

    overlong: OverlongBuffer | None = None
    normalize: bool = False
    clip: tuple[float, float] | None = None

    def punish(self, group: Group) -> Group:
        """Return the group as the filter of dynamic sampling sees it."""
        return self.overlong.punish(group) if self.overlong else group

    def finish(self, groups: Sequence[Group], before: RewardNormalizer) -> tuple[list[Group], RewardNormalizer]:
        """Return the groups as the estimator sees them, and the normalizer that has seen their rewards, too."""
        normalizer = before
        if self.normalize:
            rewards = [reward for group in groups for reward in group.rewards]
            normalizer = before.observe(torch.tensor(rewards, dtype=torch.float64))

        def shape(rewards: Sequence[float]) -> list[float]:
            shaped = torch.tensor(rewards, dtype=torch.float64)
            shaped = normalizer(shaped) if self.normalize else shaped
            shaped = shaped if self.clip is None else shaped.clamp(*self.clip)
            return shaped.tolist()

        return [
            replace(
                group,
                rewards=shape(group.rewards),
                baseline=None if group.baseline is None else shape([group.baseline])[0],
            )
            for group in groups
        ], normalizer
