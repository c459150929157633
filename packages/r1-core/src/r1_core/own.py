"""A user's own function or class as an advantage estimator or a policy loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.losses.policy import PolicyLoss
from r1_core.needs import read_needs
from r1_core.types import LossInputs

T = TypeVar("T")

DECLARED = ("needs", "token_wise", "aggregation")  # what a function may say of itself, as an attribute of its own


@dataclass(frozen=True)
class OwnEstimator(Estimator):
    """A function from `AdvantageInputs` to advantages [N, R]. Without `needs` it is given the old log-probs."""

    needs = ("old_logprobs",)

    function: Callable[[AdvantageInputs], Tensor]

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self.function(inputs)


@dataclass(frozen=True)
class OwnLoss(PolicyLoss):
    """A function from `LossInputs` to losses [B, R] and metrics by name [B, R]."""

    function: Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return self.function(inputs)


def as_estimator(mine: Any, name: str = "the estimator") -> Estimator:
    """Return a function, or an object of a class, as an estimator. Raises ValueError on needs that there are not."""
    return _as(OwnEstimator, mine, name)


def as_loss(mine: Any, name: str = "the loss") -> PolicyLoss:
    """Return a function, or an object of a class, as a policy loss. Raises ValueError on needs that there are not."""
    return _as(OwnLoss, mine, name)


def _as(own: type[T], mine: Any, name: str) -> T:
    declared = {word: getattr(mine, word) for word in DECLARED if hasattr(mine, word)}
    if "needs" in declared:
        declared["needs"] = read_needs(declared["needs"], name)
    entry: T = type(name, (own,), declared)(mine() if isinstance(mine, type) else mine)
    return entry
