"""What an advantage estimator sees: `AdvantageInputs`."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The rewards of N samples, padded on the right to R tokens.

    Example: two answers to one prompt, two and one tokens long, scored 1 and 0:
    `AdvantageInputs(token_rewards=[[0, 1], [0, 0]], group_ids=[7, 7], loss_mask=[[1, 1], [1, 0]])`.
    """

    token_rewards: Tensor  # float64 [N, R]; an outcome reward sits on the last trained token
    group_ids: Tensor  # int64 [N], any values in any order; samples of one prompt share one
    loss_mask: Tensor  # bool [N, R], true on tokens the policy chose

    @property
    def rewards(self) -> Tensor:
        """The reward of each whole sample, float64 [N]."""
        return self.token_rewards.double().sum(-1)


class Estimator(Protocol):
    """Turns rewards into advantages [N, R], which are 0 where `loss_mask` is false."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor: ...
