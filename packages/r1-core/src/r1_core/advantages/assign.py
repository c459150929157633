"""Give each sample the advantage of each of its tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.types import Sample


def assign(samples: Sequence[Sample], estimator: Estimator) -> list[Sample]:
    """Return the samples, in order, with `advantages` float32 [L] filled in: 0 where `loss_mask` is false.

    A group must be given whole. The reward counts on the last trained token; a sample without trained tokens takes
    part in its group's statistics and gets no advantage. Raises ValueError on a reward that is not finite.
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
    token_rewards = torch.zeros(len(samples), len(columns), dtype=torch.float64)
    token_rewards[torch.arange(len(samples)), (lengths - 1).clamp(min=0)] = torch.tensor(
        [sample.reward for sample in samples], dtype=torch.float64
    )
    trained = columns < lengths[:, None]
    group_ids = torch.tensor([sample.group_id for sample in samples])
    advantages = estimator(AdvantageInputs(token_rewards, group_ids, trained))
    mask = torch.cat([sample.loss_mask for sample in samples])
    flat = torch.zeros(mask.shape, dtype=torch.float32)
    flat[mask] = advantages[trained].float()
    rows = flat.split([sample.token_ids.shape[0] for sample in samples])
    return [replace(sample, advantages=row) for sample, row in zip(samples, rows, strict=True)]
