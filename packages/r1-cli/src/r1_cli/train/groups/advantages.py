"""Shape rewards (overlong penalty, normalization over the run, clipping) and compute the samples' advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from r1_cli.train.groups.group import Group, baselines, by_sample, part_rewards
from r1_core.advantages import Estimator, assign
from r1_core.kl import FULL
from r1_core.losses import Correction
from r1_core.own import OwnCodeError
from r1_core.reward_shaping import RewardNormalizer, overlong_punishment
from r1_core.types import Sample


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """DAPO's soft overlong penalty (arXiv 2503.14476). Lengths are response tokens."""

    max_length: int
    buffer: int  # tokens before `max_length` that are penalized
    factor: float  # penalty of a response that fills the buffer

    def penalties(self, group: Group) -> list[float]:
        lengths = torch.tensor([completion.sampled_length for completion in group.completions])
        return overlong_punishment(lengths, self.max_length, self.buffer, self.factor).tolist()

    def penalize(self, group: Group) -> Group:
        changes = zip(group.rewards, self.penalties(group), strict=True)
        return group.with_rewards([reward + change for reward, change in changes])

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        changes = [change for group in groups for change in self.penalties(group)]
        return {"overlong/penalty": fmean(changes), "overlong/ratio": fmean(change < 0 for change in changes)}


@dataclass(frozen=True, slots=True)
class Shaping:
    """The steps of reward shaping, in order. A field that is None or false skips its step."""

    overlong: OverlongBuffer | None = None
    normalize: bool = False
    clip: tuple[float, float] | None = None

    def penalize(self, group: Group) -> Group:
        return self.overlong.penalize(group) if self.overlong else group

    def apply(self, groups: Sequence[Group], normalizer: RewardNormalizer) -> tuple[list[Group], RewardNormalizer]:
        """Return the groups with shaped rewards, and the updated normalizer."""
        if not self.normalize and self.clip is None:
            return list(groups), normalizer
        rewards, _ = by_sample([group.rewards for group in groups])
        if self.normalize:
            normalizer = normalizer.observe(rewards)
        shaped = self._shape(rewards, normalizer).split([len(group.responses) for group in groups])
        greedy = [group.baseline for group in groups if group.baseline is not None]
        baselines = iter(self._shape(torch.tensor(greedy, dtype=torch.float64), normalizer).tolist())
        return [
            replace(
                group.with_rewards(own.tolist()),
                baseline=None if group.baseline is None else next(baselines),
            )
            for group, own in zip(groups, shaped, strict=True)
        ], normalizer

    def _shape(self, rewards: Tensor, normalizer: RewardNormalizer) -> Tensor:
        if self.normalize:
            rewards = normalizer(rewards)
        return rewards if self.clip is None else rewards.clamp(*self.clip)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        return self.overlong.metrics(groups) if self.overlong else {}


class AdvantageError(Exception):
    """The advantages of a step cannot be computed. The learner has not changed."""


@dataclass(frozen=True, slots=True)
class AdvantageComputer:
    """An estimator with the KL in the reward and the correction for the engine's log-probs."""

    estimator: Estimator
    kl_penalty: str | None = None  # in the reward; None: in the loss or nowhere
    correction: Correction | None = None

    @property
    def needs(self) -> frozenset[str]:
        needs = {*self.estimator.needs}
        if self.correction is None:
            needs.discard("correction_weights")
        elif "correction_weights" in needs:
            needs.add("old_logprobs")
        if self.kl_penalty is not None:
            needs |= {"old_logprobs", "full_kl" if self.kl_penalty == FULL else "ref_logprobs"}
        return frozenset(needs)

    def __call__(self, samples: Sequence[Sample], groups: Sequence[Group], kl_coef: float) -> list[Sample]:
        """Return the samples of `groups` with their advantages. Raises AdvantageError if the estimator raises."""
        needs = self.needs
        try:
            return assign(
                samples,
                self.estimator,
                baselines=baselines(groups) if "baselines" in needs else None,
                parts=part_rewards(groups) if "parts" in needs else None,
                correction=self.correction if "correction_weights" in needs else None,
                kl_penalty=self.kl_penalty,
                kl_coef=kl_coef,
            )
        except OwnCodeError as error:  # names the user's file and line
            raise AdvantageError(str(error)) from error
        except Exception as error:
            name = type(self.estimator).__name__
            raise AdvantageError(f"the estimator {name} fails: {type(error).__name__}: {error}") from error
