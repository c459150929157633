"""How large a micro-batch should be, by trials of a few sizes: on processors time decides, on a GPU its memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from r1_core.learner.profiling import PassProfile

PATIENCE = 1.5  # seconds that trials on processors may take in all, each but the first of them foreseen
TURNS = 8  # of each size that may be the best, as far as patience lasts
SHORTEST = 256  # tokens of the sequence that is tried first
NEAR = 1.05  # about as good as the best is what takes so much longer at most
WORSE = 1.3  # what takes so much longer in its first turn is not given another
HOPELESS = 1.6  # behind two sizes that take so much longer nothing better is looked for
MARGIN = 0.9  # of a GPU's memory: how much of it is lost to fragments differs from step to step
TRIALS = 5  # at most, on a GPU


@dataclass(frozen=True, slots=True)
class Choice:
    """A size, and what it took; `trial` is None if even one longest sequence takes longer than trials may."""

    size: int
    trial: PassProfile | None


def fastest(longest: int, most: int, attempt: Callable[[int, int], tuple[PassProfile, float]]) -> Choice:
    """Return the smallest size that is about as fast as any: caches have no room for the layers of a larger one.

    No pass is begun that is likely to take longer than all may: of a model that computes one sequence for seconds
    micro-batches are of one, which its caches are too small for already. Nor one that memory may not suffice for.
    Sizes take turns, each of which counts with its best: what disturbs the machine for a while then meets all.

    Args:
        longest: tokens of the longest sequence.
        most: the largest size that is of use.
        attempt: computes a micro-batch of (tokens a sequence, size); gives what it took, and how many sequences it had.
    """
    trials = Trials(attempt)
    length = min(longest, SHORTEST)
    trials.measure(length, 1)
    if trials.affords(trials.last.seconds):
        trials.measure(length, 1)  # the first pass of all is slow
    while length < longest:
        if not trials.affords(4 * trials.last.seconds):  # attention over twice the tokens takes four times as long
            return Choice(1, None)
        length = min(2 * length, longest)
        trials.found.clear()
        trials.measure(length, 1)
    for size in doubled(most):
        last = trials.last
        if not trials.affords(2 * last.seconds) or 2 * last.peak > psutil.virtual_memory().available:
            break
        trials.measure(longest, size)
        near = trials.candidates(HOPELESS)
        if sum(size > max(near) for size in trials.found) == 2:
            break
    for _ in range(TURNS):
        for size in trials.candidates(WORSE):
            if trials.affords(trials.found[size][1].seconds):
                trials.measure(longest, size)
    size = min(trials.candidates(NEAR))
    return Choice(size, trials.found[size][1])


def doubled(most: int) -> Iterator[int]:
    """Yield 2, 4, 8 and so on up to `most`, which comes last."""
    size = 1
    while size < most:
        size = min(2 * size, most)
        yield size


class Trials:
    """What passes of some sizes have taken so far, each in its best turn."""

    def __init__(self, attempt: Callable[[int, int], tuple[PassProfile, float]]) -> None:
        self._attempt, self._spent = attempt, 0.0
        self.found = dict[int, tuple[float, PassProfile]]()  # by size: seconds a sequence, and of the pass
        self.last: PassProfile

    def measure(self, length: int, size: int) -> None:
        """Take another turn with a size."""
        self.last, sequences = self._attempt(length, size)
        self._spent += self.last.seconds
        taken = self.last.seconds / sequences, self.last
        self.found[size] = min(self.found.get(size, taken), taken, key=lambda one: one[0])

    def affords(self, seconds: float) -> bool:
        """Whether so long a pass may still begin."""
        return self._spent + seconds <= PATIENCE

    def candidates(self, times: float) -> list[int]:
        """Return the sizes whose seconds a sequence are so many times the best ones at most."""
        best = min(each for each, _ in self.found.values())
        return [size for size, (each, _) in self.found.items() if each <= times * best]


def largest(most: int, attempt: Callable[[int], PassProfile], least: int = 1) -> Choice:
    """Return the largest size that fits, as a few sizes foretell it: each sequence more takes as much.

    Args:
        most: the largest size that is of use.
        attempt: computes micro-batches of a size. Raises torch.OutOfMemoryError.
        least: a size that is taken whatever becomes of it; what is raised then is raised on.
    """
    least = min(least, most)
    trial = attempt(least)
    fitting, size, above = Choice(least, trial), min(2 * least, most), most + 1  # which is known not to fit
    for _ in range(TRIALS - 1):
        if not fitting.size < size < above or not _fits(trial):
            break
        try:
            tried = attempt(size)
        except torch.OutOfMemoryError:
            above, size = size, (fitting.size + size) // 2
            continue
        each = max((tried.peak - trial.peak) / (size - fitting.size), 1)
        foretold = fitting.size + int((_limit(trial) - trial.peak) / each)
        if _fits(tried):
            fitting, trial = Choice(size, tried), tried
        else:
            above = size
        size = min(foretold, above - 1)
    return fitting


def _limit(trial: PassProfile) -> float:
    return MARGIN * (trial.available or 0)


def _fits(trial: PassProfile) -> bool:
    return trial.peak <= _limit(trial)
