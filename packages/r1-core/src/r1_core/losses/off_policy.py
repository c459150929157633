"""Off-policy sequence masking: drop bad answers that the policy has already moved away from."""

from torch import Tensor

from r1_core.losses.policy import row_mean, token_gap
from r1_core.types import LossInputs


def off_policy_weights(inputs: LossInputs, threshold: float) -> Tensor:
    """0 where A < 0 and the row's mean log(pi_old / pi) exceeds `threshold`, else 1, [B, R] (arXiv 2512.02556).

    Dropped tokens still count in the mean.
    """
    distance = -row_mean(token_gap(inputs).detach(), inputs.loss_mask)
    dropped = (inputs.advantages < 0) & (distance > threshold)
    return (~dropped).to(inputs.logprobs.dtype)
