"""SAPO: a soft gate instead of the clip, so that the gradient fades with the ratio instead of stopping."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import PolicyLoss, choose, log_ratio, masked_advantages
from r1_core.settings import Positive
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class SAPO(PolicyLoss):
    """−A·(4 / tau)·sigmoid(tau·(ratio − 1)), tau = tau_pos where A > 0 and tau_neg elsewhere
    (arXiv 2511.20347).

    At ratio 1 the gradient is the policy gradient; a larger tau makes it fade sooner. In the paper tau_neg exceeds
    tau_pos: updates of bad tokens raise many other tokens and are less stable.

    Use it with several optimizer steps a step, where a hard clip drops tokens just outside its range.

    Watch `actor/ppo_kl` and `actor/entropy_loss`.

    Fails where ratios leave 1 far behind: the gate fades but never stops, and no metric counts what it holds back. A
    larger tau holds back more.
    """

    names = ("sapo",)
    formula = (
        r"-A_t \frac{4}{\tau} \sigma\bigl(\tau (\rho_t - 1)\bigr), \qquad "
        r"\tau = \begin{cases} \tau_{\text{pos}} & A_t > 0 \\ \tau_{\text{neg}} & \text{else} \end{cases}"
    )
    token_wise = True

    tau_pos: Positive = 1.0  # where A > 0
    tau_neg: Positive = 1.05  # elsewhere

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        change = log_ratio(inputs)
        advantages = masked_advantages(inputs)
        tau = choose(advantages > 0, self.tau_pos, self.tau_neg, change.dtype)
        gate = torch.sigmoid(tau * (change.exp() - 1.0)) * (4.0 / tau)
        return -advantages * gate, {"ppo_kl": -change.detach()}
