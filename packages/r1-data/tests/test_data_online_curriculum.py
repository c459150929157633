"""Tests of the online curriculum: which rows it draws, by their answers."""

from collections import Counter

import numpy as np
import pytest

from r1_data.curriculum import OnlineStream, RowCounts
from r1_data.stream import Stream, WeightedStream
from r1_data.types import DataError


def online(size: int, batch: int, explored: int = 0, seed: int = 1, target: float = 0.5) -> OnlineStream:
    explorer = Stream(size, explored, seed=seed, shuffle=True, drop_last=False) if explored else None
    nearest = Stream(size, batch - explored, seed=seed, shuffle=True)
    return OnlineStream(nearest, explorer, target=target, prior=(1.0, 1.0), seed=seed)


def counts_of(rates: list[float], asked: int = 1000) -> RowCounts:
    right = np.array([round(rate * asked) for rate in rates], np.int32)
    return RowCounts(np.full(len(rates), asked, np.int32), right)


def test_the_rows_nearest_to_the_target_are_drawn() -> None:
    rates = [place / 99 for place in range(100)]
    for target in (0.0, 0.25, 0.5, 1.0):
        rows = online(100, 8, target=target).batch(0, counts_of(rates, 10**6))
        assert sorted(rows) == sorted(sorted(range(100), key=lambda row: abs(rates[row] - target))[:8])


def test_the_spread_of_a_draw_is_that_of_beta() -> None:
    """A row with 2 right answers of 4 is within 0.1 of the target as often as Beta(3, 3) is."""
    stream = online(2, 1, seed=5)
    counts = RowCounts(np.array([4, 10**6], np.int32), np.array([2, 600_000], np.int32))  # the second is 0.1 away
    drawn = Counter(stream.batch(index, counts)[0] for index in range(4000))
    inside = 0.36519  # of Beta(3, 3) between 0.4 and 0.6
    assert drawn[0] / 4000 == pytest.approx(inside, abs=4 * (inside * (1 - inside) / 4000) ** 0.5)


def test_batches_depend_on_seed_index_and_counts_alone() -> None:
    first, second = online(50, 8, explored=2), online(50, 8, explored=2)
    counts = counts_of([0.5] * 50, 8)
    forwards = [first.batch(index, counts) for index in range(12)]
    assert forwards == [second.batch(index, counts) for index in reversed(range(12))][::-1]
    assert forwards != [online(50, 8, explored=2, seed=2).batch(index, counts) for index in range(12)]
    assert forwards[3] != first.batch(3, counts_of([0.5] * 25 + [0.9] * 25, 8))
    assert forwards[0] != forwards[1]
    assert first.batch(4) == first.batch(4, RowCounts.none(50))
    assert all(len(set(rows)) == 8 for rows in forwards)


def test_exploring_draws_every_row_once_in_its_epochs() -> None:
    stream, counts = online(40, 8, explored=1), counts_of([0.5] * 8 + [1.0] * 32, 10**6)
    seen = Counter(row for index in range(40) for row in stream.batch(index, counts))
    assert set(seen) == set(range(40))
    assert all(1 <= seen[row] <= 2 for row in range(8, 40))  # perhaps once in place of another
    without = online(40, 8)
    assert {row for index in range(40) for row in without.batch(index, counts)} == set(range(8))
    partial = online(41, 8, explored=2)  # the explorer's last batch of an epoch has one row
    assert all(len(partial.batch(index)) == 8 for index in range(21))


def test_rows_of_the_step_are_drawn_only_if_there_are_no_others() -> None:
    stream, counts = online(20, 8, explored=2), counts_of([0.5] * 20, 8)
    taken = set(stream.batch(0, counts))
    assert not taken & set(stream.batch(1, counts, without=taken))
    left = set(range(20)) - set(range(3))
    rows = stream.batch(1, counts, without=left)
    assert set(range(3)) <= set(rows)
    assert len(set(rows)) == 8


def test_each_source_keeps_its_share() -> None:
    sizes, weights = [3, 60], [3, 1]
    nearest = WeightedStream(sizes, weights, 7, seed=1, shuffle=True)
    explorer = WeightedStream(sizes, weights, 1, seed=1, shuffle=True)
    stream = OnlineStream(nearest, explorer, target=0.5, prior=(1, 1), seed=1)
    rows = [row for index in range(200) for row in stream.batch(index)]
    assert len(rows) == 1600
    assert sum(row < 3 for row in rows) / 1600 == pytest.approx(0.75, abs=0.01)  # more often than it has rows


def test_counts_add_up_and_others_stay_as_they_are() -> None:
    before = RowCounts.none(4)
    after = before.add([(1, 8, 3), (3, 4, 4), (1, 2, 2)])
    assert after.asked.tolist() == [0, 10, 0, 4]
    assert after.right.tolist() == [0, 5, 0, 4]
    assert before.asked.tolist() == [0] * 4
    assert (after.asked.dtype, after.right.dtype) == (np.int32, np.int32)
    assert online(4, 2).expect(after).tolist() == [1 / 2, 6 / 12, 1 / 2, 5 / 6]


def test_counts_of_other_rows_are_told_and_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    stream = online(20, 4)
    assert stream.batch(0, counts_of([0.9] * 19)) == stream.batch(0)
    assert "of 19 rows, not 20: they begin anew" in caplog.text
    with pytest.raises(DataError, match="batch of 5 prompts cannot be filled from 4 rows"):
        online(4, 5, explored=1)
