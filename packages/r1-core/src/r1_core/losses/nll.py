"""Maximum likelihood of given tokens: the loss of supervised fine-tuning."""

from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import PolicyLoss, masked_advantages, masked_logprobs
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class NLL(PolicyLoss):
    """−w·log pi, or −w·sg(pi)·log pi with `dynamic` (DFT, arXiv 2508.05629), where w are the samples' advantages.

    With w = 1 and the aggregation `token` this is the loss that Hugging Face computes from `labels`. Other w weigh
    tokens: they change the sum, not the count that divides it. DFT weighs each token by its own probability, without a
    gradient (sg), so that tokens that the model finds unlikely do not dominate the update.

    Metrics: `nll`, the mean of −log pi without any weight, in nats.

    It has no name among `POLICY_LOSSES`, so `r1 train` does not offer it: with rewards for advantages it is REINFORCE,
    which is the loss `gpg`, and no paper has that for DFT.
    """

    token_wise = True

    dynamic: bool = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        nll = -masked_logprobs(inputs)
        losses = masked_advantages(inputs) * nll
        if self.dynamic:
            losses = losses * (-nll.detach()).exp()
        return losses, {"nll": nll.detach()}
