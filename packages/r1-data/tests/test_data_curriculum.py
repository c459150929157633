"""Tests of curricula: which rows are read, and in what order."""

import pytest

from r1_data.curriculum import Band, PassRates, read_pass_rates
from r1_data.stream import Stream, WeightedStream
from r1_data.types import DataError

RATES = [place % 9 / 8 for place in range(90)]  # ten rows of each pass rate


def epoch(stream: Stream | WeightedStream, number: int) -> list[int]:
    first = number * stream.batches_per_epoch
    return [row for index in range(first, first + stream.batches_per_epoch) for row in stream.batch(index)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_band_leaves_rows_out_and_does_not_change_the_order_of_the_others(shuffle: bool) -> None:
    levels = Band(0.125, 0.5).levels(RATES)
    assert set(levels) == {row for row, rate in enumerate(RATES) if 0.125 <= rate <= 0.5}  # ends included
    banded = Stream(90, 8, seed=2, shuffle=shuffle, drop_last=False, levels=levels)
    everything = Stream(90, 8, seed=2, shuffle=shuffle, drop_last=False)
    assert (banded.size, banded.batches_per_epoch) == (40, 5)
    for number in range(2):
        assert epoch(banded, number) == [row for row in epoch(everything, number) if row in levels]
    assert Stream(90, 8, seed=2, shuffle=shuffle, levels=dict.fromkeys(range(90), 0.0)).batch(3) == everything.batch(3)


def test_without_shuffle_and_with_dropped_batches_every_row_of_the_band_is_read() -> None:
    stream = Stream(90, 7, seed=1, shuffle=False, levels=Band(0.5, 0.5).levels(RATES))
    assert [row for index in range(10) for row in stream.batch(index)] == 7 * [4 + 9 * place for place in range(10)]


def test_the_easiest_rows_begin_every_epoch_and_rows_of_one_rate_are_shuffled() -> None:
    stream = Stream(90, 9, seed=1, shuffle=True, levels=Band(0.1, 0.9, easy_first=True).levels(RATES))
    first, second = epoch(stream, 0), epoch(stream, 1)
    for rows in (first, second):
        rates = [RATES[row] for row in rows]
        assert rates == sorted(rates, reverse=True)
        assert max(rates) == 0.875
    assert first != second
    assert first[:10] != sorted(first[:10])


def test_each_source_keeps_its_share_and_has_its_own_band() -> None:
    rates = PassRates([RATES[:36], RATES], Band(0.5, 1.0, easy_first=True))
    assert rates.sizes == [20, 50]
    assert rates.outside == 16 + 40
    stream = WeightedStream([36, 90], [3, 1], 8, seed=1, shuffle=True, levels=rates.levels)
    rows = [row for index in range(40) for row in stream.batch(index)]
    assert sum(row < 36 for row in rows) == 240
    assert min(rates.of_rows[row] for row in rows) == 0.5
    assert len(set(rows)) == 70
    of_first = [rates.of_rows[row] for index in range(3) for row in stream.batch(index) if row < 36]
    assert sorted(of_first, reverse=True)[:4] == [1.0] * 4  # all four of its rows of this rate


def test_a_source_outside_the_band_is_refused() -> None:
    with pytest.raises(DataError, match="each source needs rows"):
        WeightedStream([2, 9], [1, 1], 4, seed=1, shuffle=True, levels=[{}, {3: 0.0}])


@pytest.mark.parametrize("value", ["0.5", None, True, -0.1, 1.5, float("nan")])
def test_a_row_without_a_pass_rate_is_named(value: object) -> None:
    with pytest.raises(DataError, match=r"train:2: has .* pass_rate, a number from 0 to 1"):
        read_pass_rates([("train:1", {"pass_rate": 1}), ("train:2", {"pass_rate": value})], Band(0.0, 1.0))


def test_a_band_without_rows_names_what_there_is() -> None:
    rows = [(f"train:{place}", {"pass_rate": rate}) for place, rate in enumerate((0.0, 0.25))]
    with pytest.raises(DataError, match=r"none of the 2 rows .* \[0.5, 0.9\], theirs are from 0 to 0.25"):
        read_pass_rates(rows, Band(0.5, 0.9))
    assert read_pass_rates(rows, Band(0.0, 0.25)) == [0.0, 0.25]
