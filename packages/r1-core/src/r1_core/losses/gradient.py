"""The plain policy gradient, which is GPG's loss."""

from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import PolicyLoss, log_ratio, masked_advantages, masked_logprobs
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class PolicyGradient(PolicyLoss):
    """−A·log pi (REINFORCE; GPG, arXiv 2504.02546).

    No ratio and no clip: correct only for answers that the current policy sampled. After the first optimizer step of a
    batch, or with stale samples, add importance weights (`losses.correction`).

    Use it with one optimizer step a step, for example with the estimator `gpg`.

    Watch `actor/ppo_kl` and `actor/grad_norm`.

    Fails off policy: with several optimizer steps a step or stale samples nothing corrects or limits the update. In the
    quickstart four steps a step did no harm, at ratios near 1.
    """

    names = ("gpg", "reinforce")
    formula = r"-A_t \log \pi_t"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        losses = -masked_advantages(inputs) * masked_logprobs(inputs)
        return losses, {"ppo_kl": -log_ratio(inputs).detach()}
