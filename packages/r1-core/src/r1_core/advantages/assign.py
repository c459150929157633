"""Give each sample the advantage of each of its tokens."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from r1_core import kl
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.losses.correction import Correction, correct
from r1_core.types import Sample

logger = logging.getLogger(__name__)


def assign(
    samples: Sequence[Sample],
    estimator: Estimator,
    *,
    baselines: Sequence[float] | None = None,
    values: Sequence[Tensor] | None = None,
    parts: Sequence[Mapping[str, float]] | None = None,
    correction: Correction | None = None,
    kl_penalty: str | None = None,
    kl_coef: float = 0.0,
) -> list[Sample]:
    """Return the samples, in order, with `advantages` float32 [L] filled in: 0 where `loss_mask` is false.

    A group must be given whole. The reward counts on the last trained token; a sample without trained tokens takes
    part in its group's statistics and gets no advantage. `baselines` are the rewards of the greedy answers, one per
    sample (ReMax), `values` [L] a critic's forecasts (GAE), `parts` the rewards of each sample one by one, under
    the same names for all (GDPO), and `correction` how the gap between engine and learner is weighed (optimal token
    baseline, from the samples' `old_logprobs` and `rollout_logprobs`). With `kl_penalty`, a name of `r1_core.kl`, every
    token loses kl_coef times its KL from the reference, taken from the samples' `old_logprobs` and `ref_logprobs`, or
    from their `full_kl` with `kl.FULL`.
    Raises ValueError on a reward that is not finite, and if what the KL needs is missing.
    """
    if not samples:
        return []
    for i, sample in enumerate(samples):
        if not math.isfinite(sample.reward):
            raise ValueError(
                f"sample {i} (group {sample.group_id}) has reward {sample.reward}; give failed rewards a number first"
            )
    lengths = torch.tensor([sample.response_length for sample in samples])
    # One column at least, so that the reward of a sample without trained tokens has a place.
    columns = torch.arange(max(1, int(lengths.max())))
    trained = columns < lengths[:, None]
    token_rewards = torch.zeros(trained.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(samples)), (lengths - 1).clamp(min=0)] = torch.tensor(
        [sample.reward for sample in samples], dtype=torch.float64
    )
    mask = torch.cat([sample.loss_mask for sample in samples])
    part_names = tuple(parts[0]) if parts is not None else None
    inputs = AdvantageInputs(
        token_rewards,
        torch.tensor([sample.group_id for sample in samples]),
        trained,
        token_penalties=_penalties(samples, mask, trained, kl_penalty, kl_coef) if kl_penalty is not None else None,
        values=_rows(values, mask, trained) if values is not None else None,
        baselines=torch.tensor(baselines, dtype=torch.float64) if baselines is not None else None,
        parts=_table(parts, part_names) if parts is not None and part_names is not None else None,
        part_names=part_names,
        old_logprobs=_annotated(samples, "old_logprobs", mask, trained),
        squared_probs=_annotated(samples, "squared_probs", mask, trained),
        correction_weights=_weights(samples, correction, mask, trained) if correction is not None else None,
    )
    flat = torch.zeros(mask.shape, dtype=torch.float32)
    flat[mask] = estimator(inputs)[trained].float()
    rows = flat.split([sample.token_ids.shape[0] for sample in samples])
    _warn_of_what_is_not_finite(samples, rows, type(estimator).__name__)
    return [replace(sample, advantages=row) for sample, row in zip(samples, rows, strict=True)]


def _warn_of_what_is_not_finite(samples: Sequence[Sample], rows: Sequence[Tensor], estimator: str) -> None:
    wrong = [i for i, row in enumerate(rows) if not row.isfinite().all()]
    if wrong:
        logger.warning(
            "%s gives %d of %d samples advantages that are not finite, first sample %d (group %d, reward %g): "
            "the optimizer steps that they are in will be skipped",
            estimator, len(wrong), len(rows), wrong[0], samples[wrong[0]].group_id, samples[wrong[0]].reward,
        )  # fmt: skip


def _rows(tokens: Sequence[Tensor], mask: Tensor, trained: Tensor) -> Tensor:
    """Lay per-token tensors [L] of all samples out by trained tokens: float64 [N, R]."""
    rows = torch.zeros(trained.shape, dtype=torch.float64)
    rows[trained] = torch.cat(list(tokens))[mask].double()
    return rows


def _table(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> Tensor:
    """The parts of each sample's reward as float64 [N, K]."""
    return torch.tensor([[part[name] for name in names] for part in parts], dtype=torch.float64).reshape(-1, len(names))


def _weights(samples: Sequence[Sample], correction: Correction, mask: Tensor, trained: Tensor) -> Tensor:
    """The correction's weights over all samples [N, R]."""
    corrected, _ = correct(samples, correction)
    return _rows([sample.weights for sample in corrected if sample.weights is not None], mask, trained)


def _annotated(samples: Sequence[Sample], name: str, mask: Tensor, trained: Tensor) -> Tensor | None:
    """A per-token field of all samples in rows [N, R], None if a sample lacks it."""
    columns = [getattr(sample, name) for sample in samples]
    return None if any(column is None for column in columns) else _rows(columns, mask, trained)


def _penalties(samples: Sequence[Sample], mask: Tensor, trained: Tensor, name: str, coef: float) -> Tensor:
    needed = ("full_kl",) if name == kl.FULL else ("old_logprobs", "ref_logprobs")
    for i, sample in enumerate(samples):
        if any(getattr(sample, field) is None for field in needed):
            raise ValueError(
                f"sample {i} (group {sample.group_id}) lacks {' or '.join(needed)}, which the KL {name!r} in the "
                "reward needs; annotate the samples first, by a learner that has a reference"
            )
    columns = (_rows([getattr(sample, field) for sample in samples], mask, trained) for field in needed)
    if name == kl.FULL:
        return coef * next(columns)
    policy, reference = columns
    return kl.reward_penalties(name, policy, reference, trained, coef)
