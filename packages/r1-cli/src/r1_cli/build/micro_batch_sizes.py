"""Search the best micro-batch size: the fastest on CPUs, the largest that fits on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from r1_core.learner.profiling import PassProfile

TIME_LIMIT = 1.5  # seconds for all passes on CPUs, estimated before each pass but the first
TURNS = 8  # passes of each size that may be the best, within the time limit
SHORTEST = 256  # tokens of the first sequence
NEAR = 1.05  # as good as the best: at most this factor slower
WORSE = 1.3  # sizes slower by this factor are not measured again
HOPELESS = 1.6  # two sizes slower by this factor end the search
MARGIN = 0.9  # of a GPU's memory, as fragmentation differs from step to step
TRIALS = 5  # at most, on a GPU


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """A size and its profile; None if one longest sequence exceeds the time limit."""

    size: int
    profile: PassProfile | None


def find_fastest_size(longest: int, most: int, attempt: Callable[[int, int], tuple[PassProfile, float]]) -> SizeChoice:
    """Return the smallest size that is about as fast as any.

    Large sizes do not fit in CPU caches. Passes that would exceed the time limit or the memory are not started. Sizes
    take turns and count with their best time, so that a disturbance affects all.

    Args:
        longest: tokens of the longest sequence.
        most: the largest useful size.
        attempt: computes a micro-batch of (tokens a sequence, size); returns its profile and its number of sequences.
    """
    timed = TimedSizes(attempt)
    length = min(longest, SHORTEST)
    timed.measure(length, 1)
    if timed.affords(timed.last.seconds):
        timed.measure(length, 1)  # the first pass of all is slow
    while length < longest:
        if not timed.affords(4 * timed.last.seconds):  # attention over twice the tokens takes four times as long
            return SizeChoice(1, None)
        length = min(2 * length, longest)
        timed.found.clear()
        timed.measure(length, 1)
    for size in doubled(most):
        last = timed.last
        if not timed.affords(2 * last.seconds) or 2 * last.peak > psutil.virtual_memory().available:
            break
        timed.measure(longest, size)
        near = timed.candidates(HOPELESS)
        if sum(size > max(near) for size in timed.found) == 2:
            break
    for _ in range(TURNS):
        for size in timed.candidates(WORSE):
            if timed.affords(timed.found[size][1].seconds):
                timed.measure(longest, size)
    size = min(timed.candidates(NEAR))
    return SizeChoice(size, timed.found[size][1])


def doubled(most: int) -> Iterator[int]:
    size = 1
    while size < most:
        size = min(2 * size, most)
        yield size


class TimedSizes:
    def __init__(self, attempt: Callable[[int, int], tuple[PassProfile, float]]) -> None:
        self._attempt, self._spent = attempt, 0.0
        self.found = dict[int, tuple[float, PassProfile]]()  # by size: seconds a sequence, and of the pass
        self.last: PassProfile

    def measure(self, length: int, size: int) -> None:
        self.last, sequences = self._attempt(length, size)
        self._spent += self.last.seconds
        taken = self.last.seconds / sequences, self.last
        self.found[size] = min(self.found.get(size, taken), taken, key=lambda one: one[0])

    def affords(self, seconds: float) -> bool:
        return self._spent + seconds <= TIME_LIMIT

    def candidates(self, times: float) -> list[int]:
        """Return the sizes with at most `times` the best time per sequence."""
        best = min(each for each, _ in self.found.values())
        return [size for size, (each, _) in self.found.items() if each <= times * best]


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
