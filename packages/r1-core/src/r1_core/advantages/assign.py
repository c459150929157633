"""Fill in the advantages of samples, and the returns that a critic learns."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from r1_core import kl
from r1_core.advantages.inputs import AdvantageInputs, Estimator, Forecasting
from r1_core.advantages.scan import discounted_sums
from r1_core.losses.correction import Correction, log_gap
from r1_core.rows import known, rows, trained, with_tokens
from r1_core.types import PER_TOKEN, Sample, check_tensors

logger = logging.getLogger(__name__)

# The per-token fields of a sample that an estimator may need.
ESTIMATOR_FIELDS = [each.name for each in fields(AdvantageInputs) if each.name in PER_TOKEN]


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
    group's statistics and gets no advantage.

    Args:
        baselines: rewards of the greedy answers, one per sample (ReMax).
        parts: the rewards of each sample by name, the same names for all (GDPO).
        correction: weights for the gap between engine and learner (optimal token baseline), which needs the samples'
            `old_logprobs` and `rollout_logprobs`.
        kl_penalty: a name of `r1_core.kl`: subtract kl_coef times each token's KL from the reference, computed from the
            samples' `old_logprobs` and `ref_logprobs`, or from `full_kl` with `kl.FULL`.

    Raises ValueError on a reward that is not finite, and if a field for the KL is missing. An advantage that is not
    finite is logged with its sample and estimator.
    """
    if not samples:
        return []
    _require_finite_rewards(samples)
    mask = trained(samples)
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    last = (mask.sum(-1) - 1).clamp(min=0)
    part_names = tuple(parts[0]) if parts is not None else None
    inputs = AdvantageInputs(
        torch.zeros(mask.shape, dtype=torch.float64).scatter(1, last[:, None], rewards[:, None]),
        torch.tensor([sample.group_id for sample in samples]),
        mask,
        token_penalties=_penalties(samples, mask, kl_penalty, kl_coef) if kl_penalty is not None else None,
        baselines=torch.tensor(baselines, dtype=torch.float64) if baselines is not None else None,
        parts=_table(parts, part_names) if parts is not None and part_names is not None else None,
        part_names=part_names,
        correction_weights=_weights(samples, correction, mask) if correction is not None else None,
        **{
            need: rows(samples, need).double()
            for need in ESTIMATOR_FIELDS
            if need in estimator.needs and known(samples, need)
        },
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


def _require_finite_rewards(samples: Sequence[Sample]) -> None:
    for i, sample in enumerate(samples):
        if not math.isfinite(sample.reward):
            raise ValueError(
                f"sample {i} (group {sample.group_id}) has reward {sample.reward}; give failed rewards a number first"
            )


def _warn_of_what_is_not_finite(samples: Sequence[Sample], advantages: Tensor, estimator: str) -> None:
    wrong = (~advantages.isfinite()).any(-1).nonzero().flatten().tolist()
    logger.warning(
        "%s gives %d of %d samples advantages that are not finite, first sample %d (group %d, reward %g): "
        "the optimizer steps that they are in will be skipped",
        estimator, len(wrong), len(samples), wrong[0], samples[wrong[0]].group_id, samples[wrong[0]].reward,
    )  # fmt: skip


def _table(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> Tensor:
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
