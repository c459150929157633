"""Search the best micro-batch size: the fastest on CPUs, the largest that fits on a GPU."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from r1_core.learner.profiling import PassProfile

log = logging.getLogger("r1")

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


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """The sizes that runs on this machine's CPUs have chosen, so that the next run takes the same and repeats its bits.

    A file for each choice. Its name is a digest of all that the choice depends on, and of `about`.
    """

    folder: Path | None  # None: nothing is kept
    about: Mapping[str, Any] = field(default_factory=dict)

    def find(self, **about: Any) -> int | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(self._path(about).read_text(encoding="utf-8"))["size"])
        return None

    def keep(self, size: int, **about: Any) -> int:
        """Keep a choice; return the one of another run that was first, if there is one."""
        if self.folder is None:
            return size
        path = self._path(about)
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"size": size, **about}), encoding="utf-8")
            with suppress(FileExistsError):
                os.link(draft, path)  # fails if another run was first
        except OSError as error:
            log.warning("the size of micro-batches is not kept for the next run (%s): it may choose another", error)
            return size
        finally:
            draft.unlink(missing_ok=True)
        return self.find(**about) or size

    def _path(self, about: Mapping[str, Any]) -> Path:
        if self.folder is None:
            raise FileNotFoundError
        what = json.dumps({**self.about, **about, **describe_machine()}, sort_keys=True, default=str)
        return self.folder / f"{hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}.json"


def describe_machine() -> dict[str, Any]:
    """Return what the speed of a size depends on beside the run: processors, threads, versions."""
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, version("transformers"), version("r1-core")],
    }


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
