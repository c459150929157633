"""The base class of advantage estimators, its input, and `assign`, which fills in the advantages of samples."""

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from r1_core import kl
from r1_core.advantages.statistics import discounted_sums, row_sums
from r1_core.losses.correction import Correction, log_gap
from r1_core.needs import Needs
from r1_core.settings import check_settings
from r1_core.types import PER_TOKEN, Sample, check_tensors, known, row_mask, rows, trained, with_tokens


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The rewards of N episodes with at most R trained tokens, one row each; a single answer is an episode, too.

    Example: two answers to one prompt, two and one tokens long, scored 1 and 0:
    `AdvantageInputs(token_rewards=[[0, 1], [0, 0]], group_ids=[7, 7], loss_mask=[[1, 1], [1, 0]])`.

    Optional fields are filled if the estimator needs them. Per-token fields may be NaN where `loss_mask` is false.

    An episode that is trained as several samples is one row, so that it counts once in the statistics of its group.
    """

    token_rewards: Tensor  # float64 [N, R]; an outcome reward sits on the last trained token
    group_ids: Tensor  # int64 [N], any values in any order; episodes of one prompt share one
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

    def __post_init__(self) -> None:
        check_tensors("AdvantageInputs", "[N, R]", token_rewards=self.token_rewards)
        number, width = self.token_rewards.shape
        given = {name: getattr(self, name) for name in self.__slots__}
        given = {name: value for name, value in given.items() if value is not None or name in REQUIRED}
        names, parts = given.pop("part_names", None), given.pop("parts", None)
        per_sample = {name: given.pop(name) for name in ("group_ids", "baselines") if name in given}
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
    def scores(self) -> Tensor:
        """The reward of each episode before penalties, float64 [N]."""
        return row_sums(self.token_rewards)

    @property
    def rewards(self) -> Tensor:
        """The reward of each episode after penalties, float64 [N]."""
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
        """Repeat each episode's advantage [N] on its trained tokens: [N, R] in the dtype of the rewards."""
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


class Estimator(ABC):
    """Computes advantages [N, R], in the dtype of the rewards, 0 where `loss_mask` is false.

    A subclass is a dataclass whose fields are its settings; a setting outside the range of its type raises ValueError.
    `names` are its names in a configuration; `formula` is LaTeX, for the documentation; `needs` are the fields of
    `AdvantageInputs` to fill.
    """

    names: ClassVar[tuple[str, ...]] = ()
    formula: ClassVar[str] = ""
    needs: ClassVar[Needs] = ()

    def __post_init__(self) -> None:
        check_settings(self)

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs) -> Tensor: ...

    def with_returns(self, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
        """Return the advantages and the critic's target returns, both [N, R] and 0 outside `loss_mask`.

        The returns are the sum of the rewards from each token on, unless the estimator has its own.
        """
        return self(inputs), discounted_sums(inputs.shaped_rewards, inputs.mask, 1.0)


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

    If the estimator needs `values`, `returns` float32 [L] are filled in, too, from its `with_returns`.

    Groups must be complete. The reward counts on an episode's last trained token. An episode without trained tokens
    enters its group's statistics. Without `turn_ids` an episode is one turn, whose state is its group.

    Args:
        baselines: rewards of the greedy answers, one per episode (ReMax).
        parts: the rewards of each episode by name, the same names for all (GDPO).
        correction: weights for the gap between engine and learner (optimal token baseline), which needs
            `old_logprobs` and `rollout_logprobs`.
        kl_penalty: a name of `r1_core.kl`: subtract kl_coef times each token's KL from the reference, computed from
            `old_logprobs` and `ref_logprobs`, or from `full_kl` with `kl.FULL`.

    Raises ValueError on a reward that is not finite or on an untrained token, if an episode's samples do not stand
    together or differ in group or reward, and if a field for the KL or the states is missing. An advantage that is not
    finite is logged with its sample and estimator.
    """
    if not samples:
        return []
    firsts = _find_episodes(samples)
    group_ids = torch.tensor([samples[first].group_id for first in firsts])
    mask = _episode_mask(samples, firsts)
    inputs = AdvantageInputs(
        _token_rewards(samples, firsts, mask),
        group_ids,
        mask,
        token_penalties=None if kl_penalty is None else _penalties(samples, mask, kl_penalty, kl_coef),
        baselines=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
        parts=None if parts is None else _table(parts),
        part_names=None if parts is None else tuple(parts[0]),
        correction_weights=None if correction is None else _weights(samples, correction, mask),
        **_token_fields(samples, group_ids, mask, estimator.needs),
    )
    found = _estimate(estimator, inputs)
    flat = {name: table.masked_select(mask).float() for name, table in found.items()}
    if not flat["advantages"].isfinite().all():
        broken = (~found["advantages"].isfinite() & mask).any(-1).nonzero().flatten()
        _warn_of_what_is_not_finite(samples, [firsts[i] for i in broken], type(estimator).__name__)
    return with_tokens(samples, **flat)


def _estimate(estimator: Estimator, inputs: AdvantageInputs) -> dict[str, Tensor]:
    if "values" in estimator.needs:
        advantages, returns = estimator.with_returns(inputs)
        found = {"advantages": advantages, "returns": returns}
    else:
        found = {"advantages": estimator(inputs)}
    check_tensors(f"result of {type(estimator).__name__}", "[N, R]", inputs.mask.shape, **found)
    return found


def _find_episodes(samples: Sequence[Sample]) -> list[int]:
    """Return the index of each episode's first sample."""
    firsts, seen = list[int](), set[int]()
    for i, sample in enumerate(samples):
        if sample.episode_id < 0 or sample.episode_id not in seen:
            firsts.append(i)
            seen.add(sample.episode_id)
            continue
        before = samples[i - 1]
        for name, own, other in (
            ("episode_id", sample.episode_id, before.episode_id),
            ("group_id", sample.group_id, before.group_id),
            ("reward", sample.reward, before.reward),
        ):
            if own != other:
                raise ValueError(
                    f"sample {i} continues episode {sample.episode_id} with {name} {own}, and the sample before it has "
                    f"{other}; keep the samples of an episode together, in one group and with one reward"
                )
    return firsts


def _episode_mask(samples: Sequence[Sample], firsts: Sequence[int]) -> Tensor:
    """Return where the rows of episodes have tokens, bool [N, R]."""
    if len(firsts) == len(samples):
        return trained(samples)
    lengths = [sample.response_length for sample in samples]
    return row_mask(torch.tensor([sum(lengths[start:end]) for start, end in pairwise([*firsts, len(samples)])]))


def _token_rewards(samples: Sequence[Sample], firsts: Sequence[int], mask: Tensor) -> Tensor:
    """Return the rewards on tokens, float64 [N, R], with each episode's own reward on its last trained token."""
    rewards = torch.tensor([samples[first].reward for first in firsts], dtype=torch.float64)
    table = torch.zeros(mask.shape, dtype=torch.float64)
    if known(samples, "token_rewards"):
        table = rows(samples, "token_rewards", mask).double()
        for i, reward in enumerate(_rewards_of_untrained(samples)):
            rewards[bisect_right(firsts, i) - 1] += reward
    totals = rewards + table.sum(-1)
    for i in (~totals.isfinite()).nonzero().flatten().tolist():
        where = f"sample {firsts[i]} (group {samples[firsts[i]].group_id})"
        raise ValueError(f"{where} has reward {float(totals[i])}; give failed rewards a number first")
    last = (mask.sum(-1) - 1).clamp(min=0)
    return table.scatter_add(1, last[:, None], rewards[:, None])


def _rewards_of_untrained(samples: Sequence[Sample]) -> Iterator[float]:
    """Yield what each sample without trained tokens has on its tokens, 0 for others. Raises as `assign` does."""
    for i, sample in enumerate(samples):
        assert sample.token_rewards is not None
        lost = torch.where(sample.loss_mask, 0.0, sample.token_rewards.double())
        if sample.loss_mask.any() and lost.any():
            token = int(lost.nonzero()[0])
            raise ValueError(
                f"sample {i} (group {sample.group_id}) has reward {float(lost[token]):g} on token {token}, which the "
                "policy did not choose; put the reward of a turn on the turn's last token"
            )
        yield float(lost.sum())


def _token_fields(samples: Sequence[Sample], group_ids: Tensor, mask: Tensor, needs: Needs) -> dict[str, Tensor]:
    """Return the per-token inputs that the estimator needs, and `turns` if the samples have them."""
    needed = [name for name in ESTIMATOR_FIELDS if name in needs and known(samples, name)]
    found = {name: rows(samples, name, mask).double() for name in needed}
    has_turns = known(samples, "turn_ids")
    if has_turns:
        found["turns"] = rows(samples, "turn_ids", mask).long()
    elif "turns" in needs:
        found["turns"] = torch.zeros(mask.shape, dtype=torch.int64)
    if "states" in needs:
        if has_turns or known(samples, "state_ids"):
            found["states"] = rows(samples, "state_ids", mask).long()  # as float64 it would lose digits
        else:
            found["states"] = group_ids[:, None].expand(mask.shape)
    return found


def _warn_of_what_is_not_finite(samples: Sequence[Sample], broken: Sequence[int], estimator: str) -> None:
    logger.warning(
        "%s gives %d of %d samples advantages that are not finite, first sample %d (group %d, reward %g): "
        "the optimizer steps that they are in will be skipped",
        estimator, len(broken), len(samples), broken[0], samples[broken[0]].group_id, samples[broken[0]].reward,
    )  # fmt: skip


def _table(parts: Sequence[Mapping[str, float]]) -> Tensor:
    names = list(parts[0])
    for i, part in enumerate(parts):
        if set(part) != set(names):
            raise ValueError(f"sample {i} has the parts {sorted(part)}; sample 0 has {sorted(names)}")
    return torch.tensor([[part[name] for name in names] for part in parts], dtype=torch.float64).reshape(-1, len(names))


def _weights(samples: Sequence[Sample], correction: Correction, mask: Tensor) -> Tensor:
    old, rollout = rows(samples, "old_logprobs", mask).double(), rows(samples, "rollout_logprobs", mask).double()
    gap = log_gap(old, rollout, mask)
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
        return coef * rows(samples, "full_kl", mask).double()
    policy, reference = rows(samples, "old_logprobs", mask).double(), rows(samples, "ref_logprobs", mask).double()
    return kl.reward_penalties(name, policy, reference, mask, coef)
