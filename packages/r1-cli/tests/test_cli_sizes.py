"""How large a micro-batch is chosen."""

import pytest
import torch

from r1_cli.build.micro_batch_sizes import (
    LARGE,
    MARGIN,
    TOKENS,
    TOKENS_OF_LARGE,
    TRIALS,
    count_sequences,
    find_largest_size,
)
from r1_core.learner.profiling import PassProfile

GB = 10**9


@pytest.mark.parametrize("longest", [84, 192, 384, 700, 1100])
def test_a_micro_batch_on_cpus_has_about_as_many_tokens_whatever_the_longest_sequence(longest: int) -> None:
    assert abs(count_sequences(longest, 1000, LARGE - 1) * longest - TOKENS) <= longest / 2
    assert abs(count_sequences(longest, 1000, LARGE) * longest - TOKENS_OF_LARGE) <= longest / 2


@pytest.mark.parametrize(("longest", "most", "size"), [(84, 7, 7), (84, 1, 1), (32_768, 64, 1)])
def test_a_micro_batch_on_cpus_has_a_sequence_and_no_more_than_there_are(longest: int, most: int, size: int) -> None:
    assert count_sequences(longest, most, 10**6) == size


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
