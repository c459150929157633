"""Give each sample the advantage of each of its tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from r1_core import kl
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.types import Sample


def assign(
    samples: Sequence[Sample],
    estimator: Estimator,
    *,
    baselines: Sequence[float] | None = None,
    values: Sequence[Tensor] | None = None,
    kl_penalty: str | None = None,
    kl_coef: float = 0.0,
) -> list[Sample]:
    """Return the samples, in order, with `advantages` float32 [L] filled in: 0 where `loss_mask` is false.

    A group must be given whole. The reward counts on the last trained token; a sample without trained tokens takes
    part in its group's statistics and gets no advantage. `baselines` are the rewards of the greedy answers, one per
    sample (ReMax), and `values` [L] a critic's forecasts (GAE). With `kl_penalty`, a name of `r1_core.kl`, every token
    loses kl_coef times its KL from the reference, taken from the samples' `old_logprobs` and `ref_logprobs`.
    Raises ValueError on a reward that is not finite, and if the log-probs for the KL are missing.
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
    inputs = AdvantageInputs(
        token_rewards,
        torch.tensor([sample.group_id for sample in samples]),
        trained,
        token_penalties=_penalties(samples, mask, trained, kl_penalty, kl_coef) if kl_penalty is not None else None,
        values=_rows(values, mask, trained) if values is not None else None,
        baselines=torch.tensor(baselines, dtype=torch.float64) if baselines is not None else None,
    )
    flat = torch.zeros(mask.shape, dtype=torch.float32)
    flat[mask] = estimator(inputs)[trained].float()
    rows = flat.split([sample.token_ids.shape[0] for sample in samples])
    return [replace(sample, advantages=row) for sample, row in zip(samples, rows, strict=True)]


def _rows(tokens: Sequence[Tensor], mask: Tensor, trained: Tensor) -> Tensor:
    """Lay per-token tensors [L] of all samples out by trained tokens: float64 [N, R]."""
    rows = torch.zeros(trained.shape, dtype=torch.float64)
    rows[trained] = torch.cat(list(tokens))[mask].double()
    return rows


def _penalties(samples: Sequence[Sample], mask: Tensor, trained: Tensor, name: str, coef: float) -> Tensor:
    policy, reference = [], []
    for i, sample in enumerate(samples):
        if sample.old_logprobs is None or sample.ref_logprobs is None:
            raise ValueError(
                f"sample {i} (group {sample.group_id}) lacks old_logprobs or ref_logprobs, which the KL in the "
                "reward needs; annotate the samples first"
            )
        policy.append(sample.old_logprobs)
        reference.append(sample.ref_logprobs)
    rows = _rows(policy, mask, trained), _rows(reference, mask, trained)
    return kl.reward_penalties(name, *rows, trained, coef)
