"""How large a micro-batch should be, by trials of a few sizes: on processors time decides, on a GPU its memory."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from r1_core.learner.rehearsal import Trial

PATIENCE = 1.5  # seconds that trials on processors may take in all, each but the first of them foreseen
SHORTEST = 256  # tokens of the sequence that is tried first
NEAR = 1.05  # about as good as the best is what takes so much longer at most
WORSE = 1.2  # behind what takes so much longer nothing better is looked for
MARGIN = 0.9  # of a GPU's memory: how much of it is lost to fragments differs from step to step
TRIALS = 5  # at most, on a GPU


@dataclass(frozen=True, slots=True)
class Choice:
    """A size, and what it took; `trial` is None if even one longest sequence takes longer than trials may."""

    size: int
    trial: Trial | None


def fastest(longest: int, most: int, attempt: Callable[[int, int], tuple[Trial, float]]) -> Choice:
    """Return the smallest size that is about as fast as any: caches have no room for the layers of a larger one.

    No pass is begun that is likely to take longer than all may: of a model that computes one sequence for seconds
    micro-batches are of one, which its caches are too small for already. Nor one that memory may not suffice for.

    Args:
        longest: tokens of the longest sequence.
        most: the largest size that is of use.
        attempt: computes a micro-batch of (tokens a sequence, size); gives what it took, and how many sequences it had.
    """
    length, spent = min(longest, SHORTEST), list[float]()

    def left() -> float:
        return PATIENCE - sum(spent)

    def measure(length: int, size: int) -> tuple[Trial, float]:
        trial, sequences = attempt(length, size)
        spent.append(trial.seconds)
        if trial.seconds <= left():
            again, _ = attempt(length, size)
            spent.append(again.seconds)
            trial = min(trial, again, key=lambda one: one.seconds)
        return trial, trial.seconds / sequences

    trial, each = measure(length, 1)
    while length < longest:
        if 4 * trial.seconds > left():  # attention over twice as many tokens takes four times as long
            return Choice(1, None)
        length = min(2 * length, longest)
        trial, each = measure(length, 1)
    found, size = {1: (each, trial)}, 1
    while size < most and 2 * trial.seconds <= left() and 2 * trial.peak <= psutil.virtual_memory().available:
        size = min(2 * size, most)
        trial, each = measure(longest, size)
        found[size] = each, trial
        if each > WORSE * min(seconds for seconds, _ in found.values()):
            break
    best = min(seconds for seconds, _ in found.values())
    return next(Choice(size, trial) for size, (seconds, trial) in found.items() if seconds <= NEAR * best)


def largest(most: int, attempt: Callable[[int], Trial], least: int = 1) -> Choice:
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


def _limit(trial: Trial) -> float:
    return MARGIN * (trial.room or 0)


def _fits(trial: Trial) -> bool:
    return trial.peak <= _limit(trial)
