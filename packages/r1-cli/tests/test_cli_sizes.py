"""How large a micro-batch is chosen, from what sizes take."""

from collections.abc import Mapping

import pytest
import torch

from r1_cli.build.micro_batch_sizes import (
    MARGIN,
    SHORTEST,
    TIME_LIMIT,
    TRIALS,
    SizeChoice,
    find_fastest_size,
    find_largest_size,
)
from r1_core.learner.profiling import PassProfile

GB = 10**9


class Processor:
    """Seconds a sequence by size, none of which pass; longer sequences take as much more as they are longer."""

    def __init__(
        self, each: dict[int, float], peak: int = 0, disturbed: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        """`disturbed`: how many times as long a turn takes, by size and number of the turn."""
        self.each, self.peak, self.tried = each, peak, list[tuple[int, int]]()
        self.disturbed = disturbed or {}

    def __call__(self, length: int, size: int) -> tuple[PassProfile, float]:
        turn = self.tried.count((length, size))
        self.tried.append((length, size))
        return PassProfile(self.taken(length, size) * self.disturbed.get((size, turn), 1.0), self.peak), size

    def taken(self, length: int, size: int) -> float:
        return self.each[size] * size * length / 84

    def sizes(self) -> set[int]:
        return {size for _, size in self.tried}

    def seconds(self) -> float:
        """What all turns took, had none been disturbed."""
        return sum(self.taken(*one) for one in self.tried)


def test_the_smallest_size_that_is_about_as_fast_as_any_is_chosen() -> None:
    slower = Processor({1: 0.010, 2: 0.006, 4: 0.0041, 8: 0.0040, 16: 0.0039, 32: 0.0060, 64: 0.0090})
    assert find_fastest_size(84, 64, slower).size == 8
    assert slower.sizes() == {1, 2, 4, 8, 16, 32, 64}


def test_nothing_better_is_looked_for_behind_two_sizes_that_are_far_worse() -> None:
    slower = Processor({1: 0.0010, 2: 0.0020, 4: 0.0010, 8: 0.0020, 16: 0.0030, 32: 0.0001})
    assert find_fastest_size(84, 32, slower).size == 1
    assert slower.sizes() == {1, 2, 4, 8, 16}


def test_what_disturbs_the_machine_for_a_turn_decides_nothing() -> None:
    best = {1: 0.010, 2: 0.006, 4: 0.0042, 8: 0.0030, 16: 0.0020, 32: 0.0021, 64: 0.0026}
    disturbed = Processor(best, disturbed={(8, 0): 1.2, (16, 0): 1.25, (32, 0): 1.3, (16, 1): 3, (64, 1): 2})
    assert find_fastest_size(84, 64, disturbed).size == 16
    assert disturbed.seconds() <= TIME_LIMIT


def test_no_turn_is_begun_that_patience_does_not_suffice_for() -> None:
    for each in (0.001, 0.01, 0.1, 0.3, 0.9, 1.5):
        machine = Processor(dict.fromkeys([1, 2, 4, 8, 16, 32, 64], each))
        find_fastest_size(84, 64, machine)
        assert machine.seconds() <= TIME_LIMIT


@pytest.mark.parametrize("most", [1, 3, 7])
def test_no_micro_batch_is_larger_than_what_there_is_to_compute(most: int) -> None:
    faster = Processor({size: 0.001 / size for size in range(1, 8)})
    assert find_fastest_size(84, most, faster).size == most


def test_a_sequence_that_takes_long_is_left_alone_and_no_longer_one_is_tried() -> None:
    slow = Processor({1: TIME_LIMIT / 3})
    assert find_fastest_size(32_768, 64, slow) == SizeChoice(1, None)
    assert max(length for length, _ in slow.tried) == SHORTEST


def test_no_more_is_tried_than_memory_may_hold() -> None:
    fat = Processor({1: 0.002, 2: 0.001}, peak=1 << 60)
    assert find_fastest_size(84, 64, fat).size == 1


class GPU:
    """Takes `base` and, for each sequence, `each`, more of it the more there are; ends beyond its room."""

    def __init__(self, base: int, each: int, room: int, bend: float = 0.0) -> None:
        self.base, self.each, self.room, self.bend, self.tried = base, each, room, bend, list[int]()

    def __call__(self, size: int) -> PassProfile:
        self.tried.append(size)
        peak = self.base + int(self.each * size ** (1 + self.bend))
        if peak > self.room:
            raise torch.OutOfMemoryError
        return PassProfile(1.0, peak, self.room)


@pytest.mark.parametrize(
    ("gpu", "most", "size"),
    [
        (GPU(20 * GB, GB, 80 * GB), 1000, 52),  # nine tenths of 80, less 20
        (GPU(20 * GB, GB, 80 * GB), 40, 40),
        (GPU(20 * GB, GB, 80 * GB), 1, 1),
        (GPU(70 * GB, GB, 80 * GB), 1000, 2),
        (GPU(70 * GB, 9 * GB, 80 * GB), 1000, 1),  # two do not fit at all
        (GPU(75 * GB, GB, 80 * GB), 1000, 1),  # nor one with a margin, which is all that is left
        (GPU(20 * GB, 0, 80 * GB), 1000, 1000),
    ],
)
def test_as_many_sequences_as_fit_are_found_in_a_few_trials(gpu: GPU, most: int, size: int) -> None:
    assert find_largest_size(most, gpu).size == size
    assert len(gpu.tried) <= TRIALS


@pytest.mark.parametrize("bend", [-0.2, 0.2])
def test_what_grows_otherwise_than_foretold_stays_within_the_margin(bend: float) -> None:
    gpu = GPU(20 * GB, GB, 80 * GB, bend)
    found = find_largest_size(1000, gpu)
    assert found.profile is not None
    assert 0.6 * gpu.room < found.profile.peak <= MARGIN * gpu.room
    assert len(gpu.tried) <= TRIALS


def test_the_least_that_is_tried_must_fit() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        find_largest_size(8, GPU(90 * GB, GB, 80 * GB))
    assert find_largest_size(100, GPU(20 * GB, GB, 80 * GB), least=30).size == 52
