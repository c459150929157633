"""Choose how many sequences a micro-batch holds: on CPUs by a rule, on a GPU the most that fit."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from r1_core.learner.profiling import PassProfile

TOKENS = 3072  # of a micro-batch on CPUs: fewer cost more calls than products, more leave the caches
LARGE = 100_000_000  # parameters from which on a layer's products outweigh its calls
TOKENS_OF_LARGE = 1024  # enough for the products to outweigh the reading of weights and the adding of gradients
MARGIN = 0.9  # of a GPU's memory, as fragmentation differs from step to step
TRIALS = 5  # at most, on a GPU


@dataclass(frozen=True, slots=True)
class SizeChoice:
    size: int
    profile: PassProfile | None  # None: not profiled


def count_sequences(longest: int, most: int, parameters: int) -> int:
    """Return the sequences of a micro-batch on CPUs.

    No clock decides: it would choose by what else the machine does, and other sizes change the last bits of sums.

    Args:
        longest: tokens of the longest sequence.
        most: the largest useful size.
        parameters: of the model.
    """
    tokens = TOKENS if parameters < LARGE else TOKENS_OF_LARGE
    return max(1, min(round(tokens / longest), most))


def find_largest_size(most: int, attempt: Callable[[int], PassProfile], least: int = 1) -> SizeChoice:
    """Return the largest size that fits, extrapolating memory linearly from a few sizes.

    Args:
        most: the largest useful size.
        attempt: computes micro-batches of a size. Raises torch.OutOfMemoryError.
        least: the smallest size, whose errors are not caught.
    """
    least = min(least, most)
    profile = attempt(least)
    fitting, size, above = SizeChoice(least, profile), min(2 * least, most), most + 1  # which is known not to fit
    for _ in range(TRIALS - 1):
        if not fitting.size < size < above or not _fits(profile):
            break
        try:
            tried = attempt(size)
        except torch.OutOfMemoryError:
            above, size = size, (fitting.size + size) // 2
            continue
        each = max((tried.peak - profile.peak) / (size - fitting.size), 1)
        foretold = fitting.size + int((_limit(profile) - profile.peak) / each)
        if _fits(tried):
            fitting, profile = SizeChoice(size, tried), tried
        else:
            above = size
        size = min(foretold, above - 1)
    return fitting


def _limit(profile: PassProfile) -> float:
    return MARGIN * (profile.available or 0)


def _fits(profile: PassProfile) -> bool:
    return profile.peak <= _limit(profile)
