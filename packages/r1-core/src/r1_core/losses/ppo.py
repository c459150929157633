"""The clipped policy loss of PPO, with two clip widths and dual clip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import log_ratio
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class PPOClip:
    """max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high)), and at most −A·clip_dual where A < 0.

    arXiv 1707.06347 eq. 7 (clip); arXiv 2503.14476 section 3.1 (a wider upper clip lets unlikely tokens grow);
    arXiv 1912.09729 eq. 5 (dual clip: a bound on the loss of a bad token whose ratio has exploded).
    """

    clip_low: float = 0.2
    clip_high: float = 0.3
    clip_dual: float = 3.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low is {self.clip_low}; it must lie in [0, 1)")
        if self.clip_high < 0:
            raise ValueError(f"clip_high is {self.clip_high}; it must not be negative")
        if self.clip_dual <= 1:
            raise ValueError(f"clip_dual is {self.clip_dual}; it must be above 1")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics `ppo_kl`, `pg_clipfrac_higher` and `pg_clipfrac_lower`, each [B, R].

        `pg_clipfrac_higher` marks tokens held by the ratio clip, `pg_clipfrac_lower` those held by the dual clip;
        `ppo_kl` is log(pi_old / pi), whose mean estimates the distance from the policy that sampled.
        """
        change = log_ratio(inputs)
        advantages = torch.where(inputs.loss_mask, inputs.advantages, 0.0)
        ratio = change.exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        pessimistic = torch.maximum(plain, clipped)
        bound = -advantages * self.clip_dual
        bounded = (advantages < 0) & (pessimistic > bound)
        metrics = {
            "ppo_kl": -change.detach(),
            "pg_clipfrac_higher": (clipped > plain).to(change.dtype),
            "pg_clipfrac_lower": bounded.to(change.dtype),
        }
        return torch.where(bounded, bound, pessimistic), metrics
