"""The canary: after a sync, the engine's log-probs of a few fixed sequences must be the learner's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from r1_rollout.probes import Probes
from r1_rollout.types import Replaying

# Widest gap that is accepted, by the coarser precision of the two sides. What rounding alone does to random models of 8
# to 24 layers was measured: 2e-7 to 8e-7 in float32, 0.01 to 0.03 in bfloat16, which keeps 8 significant bits of every
# logit, on each side in its own way. float16 keeps 11.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.0075, torch.bfloat16: 0.06}

# How many times what a unit in the last place of each layer's output does to log-probs two right ways may differ by. In
# half precision it was 0.1 to 1.5 times for the embedded engine, of random models of 6 to 24 layers over responses of
# `probes.OPENING` tokens, and up to 2.2 times for vLLM.
NOISE = 8.0

_SHARE = 0.1  # of the learner's difference between two pictures


@dataclass(frozen=True, slots=True)
class Canary:
    """Sequences to compare, and the largest accepted gap.

    Below the tolerance, small updates that never arrive hide in bfloat16; the gap on sampled tokens shows them earlier.
    `opening` is compared once, with a tolerance learned from the first weights, to find faults such as wrong rotations.
    """

    probes: Probes
    fresh: Probes  # others, of the same kinds, which no cache can know
    tolerance: float  # see `TOLERANCE`
    temperature: float = 1.0  # at which both sides report
    pictures: Probes | None = None  # one text and response with two pictures, which the engine must tell apart
    opening: "Canary | None" = None  # compared at the first sync, too

    def gap(self, engine: Replaying, expected: Sequence[Sequence[float]]) -> float:
        return widest_gap(probe_logprobs(engine, self.probes, self.temperature), expected)

    def tells_pictures_apart(self, engine: Replaying, expected: Sequence[Sequence[float]]) -> bool:
        """Whether two pictures change the engine's log-probs at least a tenth as much as the learner's, `expected`."""
        assert self.pictures is not None
        first, second = probe_logprobs(engine, self.pictures, self.temperature)
        return not widest_gap([first], [second]) < _SHARE * widest_gap([expected[0]], [expected[1]])

    def accepts(self, gap: float) -> bool:
        return gap <= self.tolerance


def probe_logprobs(engine: Replaying, probes: Probes, temperature: float) -> list[list[float]]:
    return engine.logprobs_of(probes.prompts, probes.responses, temperature)


def learn_tolerance(noise: float, precision: torch.dtype) -> float:
    """Return how far two correct computations of a model's log-probs may differ.

    Args:
        noise: the `widest_gap` if each layer's output changes by a unit in the last place of `precision`; 0 or NaN:
            unknown.
        precision: the coarser one of the two sides.
    """
    least = TOLERANCE[torch.float32]
    widest = TOLERANCE.get(precision, least)
    return max(least, min(widest, NOISE * noise)) if noise > 0 else widest


def widest_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the gap of the sequence where two sides differ most: NaN where any log-prob is not finite.

    It is the mean distance of the sequence's log-probs over their mean size on the right side, or over 1 nat if that is
    less: rounding grows with the logits. Raises ValueError if the two have different lengths.
    """
    if [*map(len, left)] != [*map(len, right)]:
        lengths = [*map(len, left)], [*map(len, right)]
        raise ValueError(f"the engine and the learner gave log-probs for {lengths[0]} and {lengths[1]} tokens")
    gaps = [
        fmean(abs(a - b) for a, b in zip(one, other, strict=True)) / max(1.0, fmean(map(abs, other)))
        for one, other in zip(left, right, strict=True)
    ]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.nan
