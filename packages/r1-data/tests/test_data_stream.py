"""Tests of the stream: batches are a pure function of (seed, index)."""

import pytest

from r1_data.stream import Stream
from r1_data.types import DataError


def test_batches_depend_on_seed_and_index_only():
    first, second = Stream(50, 8, seed=3, shuffle=True), Stream(50, 8, seed=3, shuffle=True)
    forwards = [first.batch(i) for i in range(20)]
    backwards = [second.batch(i) for i in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert Stream(50, 8, seed=4, shuffle=True).batch(0) != forwards[0]


def test_order_is_the_same_on_every_machine():
    assert [Stream(10, 5, seed=1, shuffle=True).batch(i) for i in range(3)] == GOLDEN


GOLDEN = [[8, 0, 5, 6, 4], [1, 9, 2, 7, 3], [8, 0, 6, 4, 7]]


def test_an_epoch_takes_no_row_twice_and_the_next_has_another_order():
    stream = Stream(50, 8, seed=1, shuffle=True)
    assert stream.batches_per_epoch == 6  # the last 2 rows of an epoch are dropped
    epochs = [[row for i in range(6) for row in stream.batch(6 * epoch + i)] for epoch in range(2)]
    assert all(len(set(epoch)) == 48 and set(epoch) <= set(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_every_row_comes_up_over_many_epochs():
    stream = Stream(5, 2, seed=0, shuffle=True)
    assert {row for i in range(40) for row in stream.batch(i)} == set(range(5))


def test_without_shuffle_rows_come_in_order_and_the_last_ones_begin_the_next_epoch():
    stream = Stream(5, 2, seed=9, shuffle=False)
    assert [stream.batch(i) for i in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert stream.batch(2, 1, 2) == [0]


@pytest.mark.parametrize(
    ("size", "batch_size", "message"), [(3, 4, "batch of 4 prompts .* 3 rows"), (3, 0, "at least 1"), (0, 1, "0 rows")]
)
def test_batches_that_cannot_be_filled_are_refused(size, batch_size, message):
    with pytest.raises(DataError, match=message):
        Stream(size, batch_size, seed=0, shuffle=True)


def test_negative_batch_index_is_refused():
    with pytest.raises(DataError, match="at least 0"):
        Stream(3, 1, seed=0, shuffle=True).batch(-1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_dropping_an_epoch_is_every_row_once_and_its_last_batch_is_smaller(shuffle: bool) -> None:
    stream = Stream(10, 4, seed=3, shuffle=shuffle, drop_last=False)
    batches = [stream.batch(index) for index in range(6)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(10))
    assert (batches[:3] == batches[3:]) is not shuffle
    assert Stream(2, 4, seed=3, shuffle=shuffle, drop_last=False).batches_per_epoch == 1
    with pytest.raises(DataError, match="no rows"):
        Stream(0, 4, seed=3, shuffle=shuffle, drop_last=False)
