"""REINFORCE++ advantages: discounted returns, whitened over the whole batch.

A_t = (G_t − mean) / sqrt(variance + eps) with G_t = r_t + gamma · G_(t + 1), over all trained tokens of the batch.

arXiv 2501.03262 (REINFORCE++), where rewards include the KL term (`token_penalties`). No groups are needed.
Environment tokens are skipped without discount, so earlier turns are credited with later rewards. With
`gamma_per="turn"`, gamma counts only from a turn to the next.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator, check_reward_clip
from r1_core.advantages.statistics import scan, whiten_blocks
from r1_core.settings import Share, check_settings


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus(Estimator):
    """`unbiased=False` whitens with the variance over n, as OpenRLHF and LMM-R1 do. Equal returns give exactly 0.

    `reward_clip` clips rewards to two bounds before penalties are subtracted; `norm_by_std=False` subtracts the mean
    only (LMM-R1's no_advantage_std_norm).

    Use it where a prompt has one answer (`worker.rollout.n=1`) and there is no critic: the batch is the baseline.

    Watch `reward/overall`, `response_length/mean` and `critic/kl`.

    Fails where prompts differ in difficulty: without a group as baseline, right answers to easy prompts are pushed up
    in every step, although nothing is left to learn. Users report rewards that fell suddenly while answers grew
    (github.com/hkust-nlp/simpleRL-reason/issues/35) or after a steady rise (github.com/hiyouga/EasyR1/issues/463).
    """

    names = ("reinforce_plus_plus",)
    formula = (
        r"A_t = \frac{G_t - \operatorname{mean}_{\text{batch}}(G)}"
        r"{\sqrt{\operatorname{var}_{\text{batch}}(G) + \epsilon}}, \qquad G_t = r_t + \gamma G_{t+1}"
    )

    gamma: Share = 1.0
    unbiased: bool = True  # false: the variance over n, as OpenRLHF has it
    norm_by_std: bool = True
    reward_clip: tuple[float, float] | None = None
    gamma_per: Literal["token", "turn"] = "token"  # what gamma counts

    def __post_init__(self) -> None:
        check_settings(self)
        check_reward_clip(self.reward_clip)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        rewards, mask = inputs.clip(self.reward_clip).shaped_rewards, inputs.mask
        gamma = self.gamma if self.gamma_per == "token" else 1.0
        turns = None if self.gamma_per == "token" else inputs.turns

        def returns(rows: slice) -> Tensor:
            return scan(rewards[rows], mask[rows], gamma, None if turns is None else turns[rows], self.gamma)

        return whiten_blocks(returns, mask, rewards.dtype, unbiased=self.unbiased, norm_by_std=self.norm_by_std)
