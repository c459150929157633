"""VESPO: a smooth weight on each sequence's gradient that is 1 on policy and fades on both sides."""

from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    choose,
    log_ratio,
    masked_advantages,
    masked_logprobs,
)
from r1_core.settings import NonNegative
from r1_core.types import LossInputs

LOG_WEIGHT_FLOOR = -18.420680743952367  # log 1e-8


@dataclass(frozen=True, slots=True)
class VESPO(PolicyLoss):
    """−sg(phi(w))·A·log pi, phi(w) = w^k·exp(lam·(1 − w)), w = product over the row of pi / pi_old (arXiv 2602.10693).

    phi is the density of a gamma distribution scaled to phi(1) = 1; k and lam depend on the sign of A. log w is clamped
    to [log 1e-8, 20]. The metric `vespo_phi` is the weight.

    Use it with many optimizer steps a step: answers far off policy fade out smoothly.

    Watch `actor/vespo_phi` and `actor/ppo_kl`.

    Fails with long answers whose ratios drift together: their product leaves 1 exponentially in the length, phi fades
    to 0, and such answers teach nothing. `actor/vespo_phi` far below 1 says so.
    """

    names = ("vespo",)
    formula = (
        r"-\operatorname{sg}\bigl(\varphi(w)\bigr) A_t \log \pi_t, "
        r"\qquad \varphi(w) = w^k e^{\lambda (1 - w)}, \qquad w = \prod_t \rho_t"
    )

    k_pos: NonNegative = 2.0
    lam_pos: NonNegative = 3.0
    k_neg: NonNegative = 3.0
    lam_neg: NonNegative = 2.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        change, advantages = log_ratio(inputs).detach(), masked_advantages(inputs)
        log_weight = change.sum(-1, keepdim=True).clamp(LOG_WEIGHT_FLOOR, LOG_RATIO_LIMIT)
        good = advantages >= 0
        k = choose(good, self.k_pos, self.k_neg, change.dtype)
        lam = choose(good, self.lam_pos, self.lam_neg, change.dtype)
        phi = (k * log_weight + lam * (1.0 - log_weight.exp())).exp()
        return -phi * advantages * masked_logprobs(inputs), {"ppo_kl": -change, "vespo_phi": phi}
