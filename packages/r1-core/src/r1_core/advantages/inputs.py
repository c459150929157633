"""The base class of advantage estimators, its input, and `assign`, which fills in the advantages of samples."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from r1_core import kl
from r1_core.advantages.statistics import discounted_sums, row_sums
from r1_core.losses.correction import Correction, log_gap
from r1_core.needs import Needs
from r1_core.settings import check_settings
from r1_core.types import PER_TOKEN, Sample, check_tensors, known, rows, trained, with_tokens


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The rewards of N samples of E episodes, padded on the right to R tokens.

    Example: two answers to one prompt, two and one tokens long, scored 1 and 0:
    `AdvantageInputs(token_rewards=[[0, 1], [0, 0]], group_ids=[7, 7], loss_mask=[[1, 1], [1, 0]])`.

    Optional fields are filled if the estimator needs them. Per-token fields may be NaN where `loss_mask` is false.

    A sample is an episode, and E = N, unless `episodes` says otherwise. Compare episodes, so that each counts once:
    `rewards`, `scores` and `groups` are [E], and `spread` repeats advantages [E] on tokens. In an episode of several
    samples, the last trained token of one also has the rewards of those behind it.
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
    turns: Tensor | None = None  # int64 [N, R], number of each token's turn in its episode, ascending in a row
    states: Tensor | None = None  # int64 [N, R], hash of the state that the token's turn started from
    episodes: Tensor | None = None  # int64 [N], number of each sample's episode, from 0 without gaps; None: 0, 1, 2, …

    def __post_init__(self) -> None:
        check_tensors("AdvantageInputs", "[N, R]", token_rewards=self.token_rewards)
        number, width = self.token_rewards.shape
        given = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in given.items() if value is not None or name in REQUIRED}
        names, parts = given.pop("part_names", None), given.pop("parts", None)
        per_sample = {name: given.pop(name) for name in ("group_ids", "baselines", "episodes") if name in given}
        check_tensors("AdvantageInputs", "[N, R]", (number, width), **given)
        check_tensors("AdvantageInputs", "[N]", (number,), **per_sample)
        if parts is not None:
            check_tensors("AdvantageInputs", "[N, K]", parts=parts)
            kinds = parts.shape[1] if names is None else len(names)
            check_tensors("AdvantageInputs", "[N, K]", (number, kinds), parts=parts)

    @property
    def mask(self) -> Tensor:
        return self.loss_mask.bool()

    @property
    def groups(self) -> Tensor:
        """The group of each episode, [E]."""
        return self.of_episodes(self.group_ids)

    @property
    def scores(self) -> Tensor:
        """The reward of each episode before penalties, float64 [E]."""
        return self.of_episodes(row_sums(self.token_rewards))

    @property
    def rewards(self) -> Tensor:
        """The reward of each episode after penalties, float64 [E]."""
        if self.token_penalties is None:
            return self.scores
        return self.scores - self.sum_episodes(row_sums(self.token_penalties, self.mask))

    @property
    def shaped_rewards(self) -> Tensor:
        """The reward of each token after penalties [N, R]; arbitrary where `loss_mask` is false."""
        return self.token_rewards if self.token_penalties is None else self.token_rewards - self.token_penalties

    def clip(self, bounds: tuple[float, float] | None) -> "AdvantageInputs":
        """Clip the rewards before penalties; None: no clip."""
        return self if bounds is None else replace(self, token_rewards=self.token_rewards.clamp(*bounds))

    def of_episodes(self, values: Tensor) -> Tensor:
        """Return the values [N, …] of each episode's first sample, [E, …]."""
        if self.episodes is None:
            return values
        number = int(self.episodes.max()) + 1
        order = torch.arange(len(self.episodes), device=self.episodes.device)
        return values[order.new_zeros(number).scatter_reduce(0, self.episodes, order, "amin", include_self=False)]

    def sum_episodes(self, values: Tensor) -> Tensor:
        """Sum values [N] over the samples of each episode, [E]."""
        if self.episodes is None:
            return values
        return values.new_zeros(int(self.episodes.max()) + 1).index_add(0, self.episodes, values)

    def to_samples(self, values: Tensor) -> Tensor:
        """Repeat each episode's value [E] for its samples, [N]."""
        return values if self.episodes is None else values[self.episodes]

    def spread(self, advantages: Tensor) -> Tensor:
        """Repeat each episode's advantage [E] on its trained tokens: [N, R] in the dtype of the rewards."""
        return torch.where(self.mask, self.to_samples(advantages).to(self.token_rewards.dtype)[:, None], 0.0)

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


logger = logging.getLogger(__name__)

REQUIRED = ("token_rewards", "group_ids", "loss_mask")  # fields of `AdvantageInputs`

# The per-token fields of a sample that an estimator may need.
ESTIMATOR_FIELDS = [each.name for each in fields(AdvantageInputs) if each.name in PER_TOKEN and each.default is None]


def assign(
    samples: Sequence[Sample],
    estimator: Estimator,
    *,
    baselines: Sequence[float] | None = None,
    parts: Sequence[Mapping[str, float]] | None = None,
    correction: Correction | None = None,
    kl_penalty: str | None = None,
    kl_coef: float = 0.0,
) -> list[Sample]:
    """Return the samples with `advantages` float32 [L] filled in: 0 where `loss_mask` is false.

    If the estimator needs `values`, `returns` float32 [L] are filled in, too: its own (`Forecasting`), else the sum of
    the rewards from each token on.

    Groups must be complete. The reward counts on the last trained token; a sample without trained tokens enters its
    group's statistics and gets no advantage. Without `turn_ids` each sample is one turn, whose state is its group.

    Args:
        baselines: rewards of the greedy answers, one per sample (ReMax).
        parts: the rewards of each sample by name, the same names for all (GDPO).
        correction: weights for the gap between engine and learner (optimal token baseline), which needs the samples'
            `old_logprobs` and `rollout_logprobs`.
        kl_penalty: a name of `r1_core.kl`: subtract kl_coef times each token's KL from the reference, computed from the
            samples' `old_logprobs` and `ref_logprobs`, or from `full_kl` with `kl.FULL`.

    Raises ValueError on a reward that is not finite or stands on an untrained token, and if a field for the KL or for
    the states of turns is missing. An advantage that is not finite is logged with its sample and estimator.
    """
    if not samples:
        return []
    mask = trained(samples)
    needed = [name for name in ESTIMATOR_FIELDS if name in estimator.needs and known(samples, name)]
    inputs = AdvantageInputs(
        _token_rewards(samples, mask),
        torch.tensor([sample.group_id for sample in samples]),
        mask,
        token_penalties=None if kl_penalty is None else _penalties(samples, mask, kl_penalty, kl_coef),
        baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
        parts=None if parts is None else _table(parts),
        part_names=None if parts is None else tuple(parts[0]),
        correction_weights=None if correction is None else _weights(samples, correction, mask),
        episodes=_number_episodes(samples),
        **_turns_and_states(samples, mask, estimator.needs),
        **{name: rows(samples, name).double() for name in needed},
    )
    found = _estimate(estimator, inputs)
    flat = {name: table.masked_select(mask).float() for name, table in found.items()}
    if not flat["advantages"].isfinite().all():
        _warn_of_what_is_not_finite(samples, torch.where(mask, found["advantages"], 0.0), type(estimator).__name__)
    return with_tokens(samples, **flat)


def _estimate(estimator: Estimator, inputs: AdvantageInputs) -> dict[str, Tensor]:
    if isinstance(estimator, Forecasting):
        advantages, returns = estimator.with_returns(inputs)
        found = {"advantages": advantages, "returns": returns}
    else:
        found = {"advantages": estimator(inputs)}
        if "values" in estimator.needs:
            found["returns"] = discounted_sums(inputs.shaped_rewards, inputs.mask, 1.0)
    check_tensors(f"result of {type(estimator).__name__}", "[N, R]", inputs.mask.shape, **found)
    return found


def _token_rewards(samples: Sequence[Sample], mask: Tensor) -> Tensor:
    """Return the rewards on tokens, float64 [N, R], with each sample's own reward on its last trained token."""
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    table = torch.zeros(mask.shape, dtype=torch.float64)
    if known(samples, "token_rewards"):
        table = rows(samples, "token_rewards").double()
        rewards = rewards + _rewards_elsewhere(samples, table)
    for i in (~(rewards + table.sum(-1)).isfinite()).nonzero().flatten().tolist():
        where = f"sample {i} (group {samples[i].group_id})"
        raise ValueError(f"{where} has reward {float(rewards[i])}; give failed rewards a number first")
    last = (mask.sum(-1) - 1).clamp(min=0)
    return table.scatter_add(1, last[:, None], rewards[:, None])


def _rewards_elsewhere(samples: Sequence[Sample], table: Tensor) -> Tensor:
    """Return what a sample earns beyond its row [N]: in later samples of its episode, or if it has no trained token."""
    later: dict[int, float] = {}
    found = []
    for i, sample in reversed([*enumerate(samples)]):
        assert sample.token_rewards is not None
        own = sample.token_rewards.double()
        if sample.loss_mask.any() and (own[~sample.loss_mask] != 0).any():
            place = int(((own != 0) & ~sample.loss_mask).nonzero()[0])
            where = f"sample {i} (group {sample.group_id})"
            raise ValueError(f"{where} has reward {own[place]:g} on token {place}, which the policy did not choose")
        behind = later.get(sample.episode_id, 0.0) if sample.episode_id >= 0 else 0.0
        later[sample.episode_id] = behind + float(own.sum())
        found.append(later[sample.episode_id] - float(table[i].sum()))
    return torch.tensor(found[::-1], dtype=torch.float64)


def _number_episodes(samples: Sequence[Sample]) -> Tensor | None:
    """Return the number of each sample's episode [N]; None if each is one."""
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for i, sample in enumerate(samples):
        key = ("sample", i) if sample.episode_id < 0 else ("episode", sample.episode_id)
        found.append(numbers.setdefault(key, len(numbers)))
    return None if len(numbers) == len(samples) else torch.tensor(found)


def _turns_and_states(samples: Sequence[Sample], mask: Tensor, needs: Needs) -> dict[str, Tensor]:
    """Return `turns` if samples have them or the estimator needs them, and `states` if it needs them."""
    has_turns = known(samples, "turn_ids")
    found: dict[str, Tensor] = {}
    if has_turns:
        found["turns"] = rows(samples, "turn_ids").long()
    elif "turns" in needs:
        found["turns"] = torch.zeros(mask.shape, dtype=torch.int64)
    if "states" in needs:
        if has_turns or known(samples, "state_ids"):
            found["states"] = rows(samples, "state_ids").long()
        else:
            found["states"] = torch.tensor([sample.group_id for sample in samples])[:, None].expand(mask.shape)
    return found


def _warn_of_what_is_not_finite(samples: Sequence[Sample], advantages: Tensor, estimator: str) -> None:
    wrong = (~advantages.isfinite()).any(-1).nonzero().flatten().tolist()
    logger.warning(
        "%s gives %d of %d samples advantages that are not finite, first sample %d (group %d, reward %g): "
        "the optimizer steps that they are in will be skipped",
        estimator, len(wrong), len(samples), wrong[0], samples[wrong[0]].group_id, samples[wrong[0]].reward,
    )  # fmt: skip


def _table(parts: Sequence[Mapping[str, float]]) -> Tensor:
    names = list(parts[0])
    for i, part in enumerate(parts):
        if set(part) != set(names):
            raise ValueError(f"sample {i} has the parts {sorted(part)}; sample 0 has {sorted(names)}")
    return torch.tensor([[part[name] for name in names] for part in parts], dtype=torch.float64).reshape(-1, len(names))


def _weights(samples: Sequence[Sample], correction: Correction, mask: Tensor) -> Tensor:
    gap = log_gap(rows(samples, "old_logprobs").double(), rows(samples, "rollout_logprobs").double(), mask)
    return correction.weights(gap, mask)


def _penalties(samples: Sequence[Sample], mask: Tensor, name: str, coef: float) -> Tensor:
    needed = ("full_kl",) if name == kl.FULL else ("old_logprobs", "ref_logprobs")
    for i, sample in enumerate(samples):
        if any(sample.get(field) is None for field in needed):
            raise ValueError(
                f"sample {i} (group {sample.group_id}) lacks {' or '.join(needed)}, which the KL {name!r} in the "
                "reward needs: call add_logprobs first, of a learner that has a reference"
            )
    if name == kl.FULL:
        return coef * rows(samples, "full_kl").double()
    policy, reference = rows(samples, "old_logprobs").double(), rows(samples, "ref_logprobs").double()
    return kl.reward_penalties(name, policy, reference, mask, coef)
