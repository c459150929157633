"""Shape rewards: punish overlong answers; normalize to mean 0 and std 1 with fixed, one batch's or running moments.

(r − mean) / (std + eps), with the unbiased std. Fixed: `RewardNormalizer(mean, std)`, for moments that come with a
reward model (OpenRLHF's and LMM-R1's normalize_reward). One batch: `RewardNormalizer.of(rewards)(rewards)`. Running:
call `observe` with every step's rewards first (arXiv 1909.08593, "Fine-tuning language models from human
preferences"). Moments of several batches combine to those of one pass over all rewards.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.statistics import group_statistics
from r1_core.types import check_tensors


@dataclass(frozen=True, slots=True)
class RewardNormalizer:
    """Immutable: `observe` returns the next one, and the fields are the state to checkpoint. Equal rewards give 0."""

    mean: float = 0.0
    std: float = 1.0
    count: int = 0  # rewards observed; 0: mean and std are what the user set
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std is {self.std}; it must not be negative")

    def __call__(self, rewards: Tensor) -> Tensor:
        check_tensors("RewardNormalizer", "[N]", rewards=rewards)
        return (rewards.double() - self.mean) / (self.std + self.eps)

    @classmethod
    def of(cls, rewards: Tensor, eps: float = 1e-8) -> "RewardNormalizer":
        """Return the normalizer with the moments of these rewards [N]. Raises ValueError if one is not finite."""
        return cls(eps=eps).observe(rewards)

    def observe(self, rewards: Tensor) -> "RewardNormalizer":
        """Return the normalizer updated with rewards [N]; the first ones replace a fixed mean and std.

        Raises ValueError if a reward is not finite.
        """
        check_tensors("RewardNormalizer", "[N]", rewards=rewards)
        if not rewards.isfinite().all():
            row = int((~rewards.isfinite()).nonzero()[0])
            raise ValueError(f"reward {row} is {float(rewards[row])}; give failed rewards a number first")
        number = rewards.shape[0]
        if not number:
            return self
        batch = group_statistics(rewards, torch.zeros(number, dtype=torch.int64, device=rewards.device))
        mean, std = float(batch.mean[0]), float(batch.std[0])
        if not self.count:
            return RewardNormalizer(mean, std, number, self.eps)
        total, shift = self.count + number, mean - self.mean
        squares = self.std**2 * (self.count - 1) + std**2 * (number - 1) + shift**2 * self.count * number / total
        return RewardNormalizer(self.mean + shift * number / total, math.sqrt(squares / (total - 1)), total, self.eps)


def overlong_punishment(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's soft overlong punishment, from −factor to 0, for answer lengths [N] in tokens: float64 [N].

    With free = max_length − buffer: 0 up to `free` tokens, (free − length) / buffer beyond, −1 from `max_length` on;
    times `factor`, and added to an answer's score. arXiv 2503.14476 (DAPO).

    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be above 0 and at most max_length, {max_length}")
    check_tensors("overlong_punishment", "[N]", lengths=lengths)
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * torch.clamp(excess, 0.0, 1.0)
