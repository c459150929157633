"""GAE: a critic's value estimates give every token its own advantage.

A_t = delta_t + gamma · lam · A_(t + 1) with delta_t = r_t + gamma · V_(t + 1) − V_t; returns = A + V; then whitening.

With `gamma_per="turn"`, gamma counts only from a turn to the next; lam counts tokens.

arXiv 1506.02438 (GAE); whitening as PPO implementations do it. Needs `values` [N, R], the critic's estimate of the
return before each token; past the last trained token the value is 0. Environment tokens are skipped: the next token is
the next trained one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator, check_reward_clip
from r1_core.advantages.statistics import Blocks, following, scan, whiten_blocks
from r1_core.settings import Share, check_settings


@dataclass(frozen=True, slots=True)
class GAE(Estimator):
    """`unbiased=False` whitens with the variance over n, as OpenRLHF and LMM-R1 do.

    `reward_clip` clips rewards to two bounds before penalties are subtracted; `norm_by_std=False` subtracts the mean
    only (LMM-R1's no_advantage_std_norm).

    Use it where credit shall differ from token to token, and there is memory and time for a critic. One answer a
    prompt is enough.

    Watch `critic/vf_explained_var`, `critic/vf_loss` and `actor/entropy_loss`.

    Fails where the critic is wrong: one that starts from zero misleads the first updates, and `lam` below 1 lets a
    reward at the end of a long answer fade before it reaches the start (arXiv 2503.01491): use
    `trainer.critic_warmup`, `lam=1`, and a critic's rate above the policy's. Cost: a second model.
    """

    names = ("gae",)
    formula = (
        r"A_t = \delta_t + \gamma \lambda A_{t+1}, \qquad "
        r"\delta_t = r_t + \gamma V_{t+1} - V_t"
    )
    needs = ("values",)

    gamma: Share = 1.0
    lam: Share = 1.0
    unbiased: bool = True  # false: the variance over n, as OpenRLHF has it
    norm_by_std: bool = True
    reward_clip: tuple[float, float] | None = None
    gamma_per: Literal["token", "turn"] = "token"  # what gamma counts

    def __post_init__(self) -> None:
        check_settings(self)
        check_reward_clip(self.reward_clip)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self._whiten(self._blocks(inputs), inputs)

    def with_returns(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        advantages, returns = self.estimate(inputs)
        return self._whiten(advantages.__getitem__, inputs), returns

    def estimate(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return unwhitened advantages and returns, float64 [N, R], 0 outside the mask."""
        mask = inputs.mask
        advantages = torch.where(mask, self._blocks(inputs)(slice(None)), 0.0)
        return advantages, torch.where(mask, advantages + inputs.require("values", "GAE"), 0.0)

    def _whiten(self, blocks: Blocks, inputs: AdvantageInputs) -> Tensor:
        dtype = inputs.token_rewards.dtype
        return whiten_blocks(blocks, inputs.mask, dtype, unbiased=self.unbiased, norm_by_std=self.norm_by_std)

    def _blocks(self, inputs: AdvantageInputs) -> Blocks:
        rewards, mask = inputs.clip(self.reward_clip).shaped_rewards, inputs.mask
        values = inputs.require("values", "GAE")
        gamma = self.gamma if self.gamma_per == "token" else 1.0
        turns = None if self.gamma_per == "token" else inputs.turns

        def advantages(rows: slice) -> Tensor:
            trained, own = mask[rows], None if turns is None else turns[rows]
            later = following(values[rows], trained).mul_(gamma)
            if own is not None:
                later = torch.where(following(own, trained) == own, later, later * self.gamma)
            return scan(later.sub_(values[rows]).add_(rewards[rows]), trained, gamma * self.lam, own, self.gamma)

        return advantages
