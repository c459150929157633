"""Tests of mixtures: shares, purity, readers in parallel, and what an epoch is."""

from collections import Counter
from math import ceil, floor, inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r1_data.dataset import Mixture, PromptDataset
from r1_data.messages import RowReader
from r1_data.render import Renderer
from r1_data.stream import Stream, WeightedStream, share
from r1_data.types import DataError

sources = st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 5)), min_size=1, max_size=4)
mixtures = st.tuples(sources, st.integers(1, 16), st.integers(0, 9), st.booleans())


def make(mixture) -> WeightedStream:
    parts, batch_size, seed, shuffle = mixture
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    return WeightedStream(sizes, weights, batch_size, seed=seed, shuffle=shuffle)


def source_of(stream: WeightedStream, row: int) -> int:
    return next(i for i in range(len(stream.sizes)) if row < sum(stream.sizes[: i + 1]))


@settings(max_examples=40)
@given(mixtures, st.lists(st.integers(0, 25), min_size=1, max_size=6))
def test_a_batch_depends_on_seed_and_number_alone(mixture, indices):
    used = make(mixture)
    assert [used.batch(index) for index in indices] == [make(mixture).batch(index) for index in indices]


@settings(max_examples=40)
@given(mixtures, st.integers(0, 25), st.integers(1, 9))
def test_readers_in_parallel_share_the_batch_whatever_their_number(mixture, index, world):
    stream = make(mixture)
    shares = [make(mixture).batch(index, rank, world) for rank in range(world)]
    assert [row for rows in shares for row in rows] == stream.batch(index)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=40)
@given(mixtures, st.integers(0, 25))
def test_each_batch_holds_each_sources_share_rounded_up_or_down(mixture, index):
    stream, total = make(mixture), sum(weight for _, weight in mixture[0])
    counts = Counter(source_of(stream, row) for row in stream.batch(index))
    assert counts.total() == stream.batch_size
    for source, (_, weight) in enumerate(mixture[0]):
        exact = stream.batch_size * weight / total
        assert floor(exact - 1e-6) <= counts[source] <= ceil(exact + 1e-6)


@settings(max_examples=30)
@given(mixtures)
def test_a_source_gives_every_row_once_before_any_row_twice(mixture):
    stream = make(mixture)
    drawn = [row for index in range(12) for row in stream.batch(index)]
    for source, size in enumerate(stream.sizes):
        counts = Counter(row for row in drawn if source_of(stream, row) == source)
        assert len(counts) == min(size, counts.total())
        assert not counts or max(counts.values()) <= ceil(counts.total() / size)


def test_shares_are_exact_on_average():
    stream = WeightedStream([100, 100, 100], [0.1, 0.4, 0.5], 7, seed=1, shuffle=True)
    counts = Counter(source_of(stream, row) for index in range(2000) for row in stream.batch(index))
    shares = [counts[source] / counts.total() for source in range(3)]
    assert shares == pytest.approx([0.1, 0.4, 0.5], abs=0.005)


def test_sources_are_spread_over_the_batch_not_one_after_the_other():
    stream = WeightedStream([50, 50], [1, 1], 16, seed=1, shuffle=True)
    first_halves = [sum(row < 50 for row in stream.batch(index)[:8]) for index in range(20)]
    assert len(set(first_halves)) > 2


def test_the_order_is_the_same_on_every_machine():
    stream = WeightedStream([6, 4], [2, 1], 5, seed=1, shuffle=True)
    assert [stream.batch(index) for index in range(3)] == GOLDEN


GOLDEN = [[2, 4, 7, 3, 6], [0, 5, 1, 8, 9], [3, 4, 6, 5, 8]]


@pytest.mark.parametrize(("until", "batches"), [("all_exhausted", 20), ("first_exhausted", 2)])
def test_an_epoch_ends_with_the_last_or_the_first_source(until, batches):
    stream = WeightedStream([10, 100], [1, 1], 10, seed=0, shuffle=True, until=until)
    assert stream.batches_per_epoch == batches


@pytest.mark.parametrize("seed", range(5))
def test_an_epoch_of_small_batches_reads_every_source_to_its_end(seed):
    stream = WeightedStream([7, 5, 3], [3, 2, 1], 1, seed=seed, shuffle=True)
    assert {row for index in range(stream.batches_per_epoch) for row in stream.batch(index)} == set(range(15))


@pytest.mark.parametrize(
    ("sizes", "weights", "batch_size"),
    [([], [], 2), ([3], [0], 2), ([0, 3], [1, 1], 2), ([3], [1, 1], 2), ([3], [1], 0)]
    + [([3, 3], pair, 2) for pair in ([inf, 1], [nan, 1], [1e308, 1e308], [1, 1e-300])],
)
def test_mixtures_that_cannot_be_drawn_are_refused(sizes, weights, batch_size):
    with pytest.raises(DataError):
        WeightedStream(sizes, weights, batch_size, seed=0, shuffle=True)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_reader_beyond_the_last_is_refused(rank, world):
    with pytest.raises(DataError, match="rank must be at least 0 and below world"):
        Stream(4, 2, seed=0, shuffle=True).batch(0, rank, world)


@given(st.integers(1, 60), st.integers(1, 9))
def test_shares_of_any_batch_are_contiguous_and_complete(size, world):
    batch = list(range(size))
    assert [row for rank in range(world) for row in share(batch, rank, world)] == batch


def test_a_mixture_plans_the_prompts_of_its_parts_in_the_order_of_the_batch():
    class Memory(list):
        __hash__ = object.__hash__
        prefetch = list.append

    class Part(str):
        renders_ahead = True

        def job(self, index):
            return self[index]

    shared, own = Memory(), Memory()
    parts = [Part("ab"), Part("c"), Part("def")]
    for part, memory in zip(parts, (shared, own, shared), strict=True):
        part.memory = memory
    mixture = Mixture(parts)
    mixture.prefetch([5, 0, 2, 3, 1])
    mixture.prefetch([2])
    assert shared == [["f", "a", "d", "b"], []]  # the second batch replaces the first
    assert own == [["c"], ["c"]]


def test_a_mixture_is_its_datasets_one_after_the_other(tokenizer):
    def dataset(name: str, size: int) -> PromptDataset:
        rows = [(f"{name}:{i}", {"prompt": str(i), "answer": "1"}) for i in range(size)]
        return PromptDataset(rows, Renderer(tokenizer), max_prompt_length=99, reader=RowReader(source=name))

    mixture = Mixture([dataset("a", 2), dataset("b", 3)])
    assert [mixture[i].id for i in range(len(mixture))] == ["a:0", "a:1", "b:0", "b:1", "b:2"]
    assert [(mixture[i].source, mixture[i].metadata["data_source"]) for i in (1, 2)] == [("a", "a"), ("b", "b")]
    with pytest.raises(IndexError):
        mixture[5]
