"""CISPO: clip the importance weight instead of the update, so that every token keeps a gradient."""

from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import PolicyLoss, log_ratio, masked_advantages, masked_logprobs
from r1_core.settings import NonNegative
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class CISPO(PolicyLoss):
    """−sg(clip(ratio, 1 − clip_low, 1 + clip_high))·A·log pi (arXiv 2506.13585).

    The weight carries no gradient (sg). A clip_low of 1 or more means no lower bound, as in the paper. The metric
    `pg_clipfrac_higher` counts tokens with a clipped weight.

    Use it with several optimizer steps a step: PPO's clip then removes rare but important tokens from the update.

    Watch `actor/pg_clipfrac_higher`, `actor/ppo_kl` and `actor/entropy_loss`.

    Fails with stale samples: no token is ever dropped, so nothing stops the update. If `actor/ppo_kl` grows from step
    to step, take fewer optimizer steps.
    """

    names = ("cispo",)
    formula = (
        r"-\operatorname{sg}\bigl(\operatorname{clip}(\rho_t, 1 - c_{\text{low}}, 1 + c_{\text{high}})\bigr) "
        r"A_t \log \pi_t"
    )
    token_wise = True

    clip_low: NonNegative = 1.0  # 1 or more: no lower bound
    clip_high: NonNegative = 4.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        change = log_ratio(inputs).detach()
        ratio = change.exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = -weight * masked_advantages(inputs) * masked_logprobs(inputs)
        return losses, {"ppo_kl": -change, "pg_clipfrac_higher": (weight != ratio).to(change.dtype)}
