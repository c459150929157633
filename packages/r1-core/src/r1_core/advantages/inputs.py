"""The base class of advantage estimators and its input, `AdvantageInputs`."""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from r1_core.advantages.scan import row_sums
from r1_core.needs import Needs
from r1_core.settings import check_settings
from r1_core.types import check_tensors


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The rewards of N samples, padded on the right to R tokens.

    Example: two answers to one prompt, two and one tokens long, scored 1 and 0:
    `AdvantageInputs(token_rewards=[[0, 1], [0, 0]], group_ids=[7, 7], loss_mask=[[1, 1], [1, 0]])`.

    Optional fields are filled if the estimator needs them. Per-token fields may be NaN where `loss_mask` is false.
    """

    token_rewards: Tensor  # float64 [N, R]; an outcome reward sits on the last trained token
    group_ids: Tensor  # int64 [N], any values in any order; samples of one prompt share one
    loss_mask: Tensor  # bool [N, R], true on tokens the policy chose
    token_penalties: Tensor | None = None  # [N, R], taken off the rewards, as by `kl.reward_penalties`
    values: Tensor | None = None  # [N, R], a critic's forecast before each token (GAE)
    baselines: Tensor | None = None  # [N], the reward of the prompt's greedy answer (ReMax)
    old_logprobs: Tensor | None = None  # [N, R], of the sampled tokens (optimal token baseline)
    squared_probs: Tensor | None = None  # [N, R], sum over the vocabulary of squared probabilities (the same)
    ref_logprobs: Tensor | None = None  # [N, R], of the sampled tokens, the frozen reference's
    full_kl: Tensor | None = None  # [N, R], KL of the policy's distribution from the reference's, over the vocabulary
    correction_weights: Tensor | None = None  # [N, R], of learner against engine (the same)
    parts: Tensor | None = None  # [N, K], several rewards of each answer (GDPO)
    part_names: tuple[str, ...] | None = None  # K names of theirs
    rollout_logprobs: Tensor | None = None  # [N, R], of the sampled tokens, as the engine sampled

    def __post_init__(self) -> None:
        check_tensors("AdvantageInputs", "[N, R]", token_rewards=self.token_rewards)
        number, width = self.token_rewards.shape
        given = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        names, parts, baselines = (given.pop(name, None) for name in ("part_names", "parts", "baselines"))
        group_ids, loss_mask = given.pop("group_ids", None), given.pop("loss_mask", None)
        check_tensors("AdvantageInputs", "[N, R]", (number, width), loss_mask=loss_mask, **given)
        check_tensors("AdvantageInputs", "[N]", (number,), group_ids=group_ids)
        if baselines is not None:
            check_tensors("AdvantageInputs", "[N]", (number,), baselines=baselines)
        if parts is not None:
            check_tensors("AdvantageInputs", "[N, K]", parts=parts)
            kinds = parts.shape[1] if names is None else len(names)
            check_tensors("AdvantageInputs", "[N, K]", (number, kinds), parts=parts)

    @property
    def mask(self) -> Tensor:
        return self.loss_mask.bool()

    @property
    def scores(self) -> Tensor:
        """The reward of each sample before penalties, float64 [N]."""
        return row_sums(self.token_rewards)

    @property
    def rewards(self) -> Tensor:
        """The reward of each sample after penalties, float64 [N]."""
        if self.token_penalties is None:
            return self.scores
        return self.scores - row_sums(self.token_penalties, self.mask)

    @property
    def shaped_rewards(self) -> Tensor:
        """The reward of each token after penalties [N, R]; arbitrary where `loss_mask` is false."""
        return self.token_rewards if self.token_penalties is None else self.token_rewards - self.token_penalties

    def clip(self, bounds: tuple[float, float] | None) -> "AdvantageInputs":
        """Clip the rewards before penalties; None: no clip."""
        return self if bounds is None else replace(self, token_rewards=self.token_rewards.clamp(*bounds))

    def spread(self, advantages: Tensor) -> Tensor:
        """Repeat each sample's advantage [N] on its trained tokens: [N, R] in the dtype of the rewards."""
        return torch.where(self.mask, advantages.to(self.token_rewards.dtype)[:, None], 0.0)

    def require(self, name: str, estimator: str) -> Tensor:
        """Return an optional field. Raises ValueError if it is missing."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{estimator} needs `{name}` but the advantage inputs have none")
        return value


def check_reward_clip(bounds: tuple[float, float] | None) -> None:
    if bounds is not None and not bounds[0] <= bounds[1]:
        raise ValueError(f"reward_clip is {bounds}; the first number must not exceed the second")


class Estimator(Protocol):
    """Computes advantages [N, R], in the dtype of the rewards, 0 where `loss_mask` is false.

    A subclass is a dataclass whose fields are its settings; a setting outside the range of its type raises ValueError.
    `names` are its names in a configuration; `needs` are the fields of `AdvantageInputs` to fill.
    """

    names: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[Needs] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    def __call__(self, inputs: AdvantageInputs) -> Tensor: ...


@runtime_checkable
class Forecasting(Protocol):
    """An estimator that also returns the targets of the critic."""

    def with_returns(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return the advantages and the critic's target returns, both [N, R] and 0 outside `loss_mask`."""
        ...
