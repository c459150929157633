"""Curricula: which rows a run reads, by recorded pass rates or by its own answers."""

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from r1_data.stream import Levels, Stream, WeightedStream, shuffled
from r1_data.types import DataError, Row

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("r1_data")

COLUMN = "pass_rate"  # of rows that `r1 rows` wrote


@dataclass(frozen=True, slots=True)
class Band:
    """The pass rates of the rows that are read."""

    low: float
    high: float
    easy_first: bool = False  # an epoch begins with the rows of the highest pass rates

    def levels(self, rates: Sequence[float]) -> dict[int, float]:
        """Return the levels of the rows in the band, by row, as `Stream` takes them."""
        found = enumerate(rates)
        return {row: -rate if self.easy_first else 0.0 for row, rate in found if self.low <= rate <= self.high}

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, slots=True)
class PassRates:
    """The pass rates of all rows, source after source, and the band that is read."""

    sources: Sequence[Sequence[float]]
    band: Band

    @property
    def of_rows(self) -> list[float]:
        return [rate for source in self.sources for rate in source]

    @property
    def levels(self) -> list[Levels]:
        return [self.band.levels(source) for source in self.sources]

    @property
    def sizes(self) -> list[int]:
        """The rows in the band, of each source."""
        return [len(levels) for levels in self.levels]

    @property
    def outside(self) -> int:
        return sum(map(len, self.sources)) - sum(self.sizes)


def read_pass_rates(rows: Iterable[tuple[str, Row]], band: Band) -> list[float]:
    """Return the column `pass_rate` of (row id, row).

    Raises DataError if a row has none or it is no number from 0 to 1, or no row is in the band.
    """
    rates = [_pass_rate(row_id, row.get(COLUMN)) for row_id, row in rows]
    if not band.levels(rates):
        ends = f", theirs are from {min(rates):g} to {max(rates):g}" if rates else ""
        raise DataError(f"none of the {len(rates)} rows has a pass rate in the band {band}{ends}")
    return rates


def _pass_rate(row_id: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    found = "has no" if value is None else f"has {value!r} as"
    raise DataError(f"{row_id}: {found} {COLUMN}, a number from 0 to 1: `r1 rows … --as rates` writes rows with one")


# --- by the run's own answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RowCounts:
    """How many answers each row has had, and how many of them were right: int32 [rows] each."""

    asked: "NDArray[np.int32]"
    right: "NDArray[np.int32]"

    @classmethod
    def none(cls, rows: int) -> "RowCounts":
        import numpy as np

        return cls(np.zeros(rows, np.int32), np.zeros(rows, np.int32))

    def add(self, answers: Iterable[tuple[int, int, int]]) -> "RowCounts":
        """Return the counts with (row, asked, right) added."""
        asked, right = self.asked.copy(), self.right.copy()
        for row, more_asked, more_right in answers:
            asked[row] += more_asked
            right[row] += more_right
        return RowCounts(asked, right)


class OnlineStream:
    """Batches of the rows whose pass rate seems nearest to a target; a pure function of (seed, batch number, counts).

    A row's pass rate is drawn from Beta(right + prior, wrong + prior): Thompson sampling. Each source keeps its share
    of a batch. `explorer` gives further rows whatever their counts, in the order of its own epochs. Draws are those of
    this version of numpy.
    """

    def __init__(
        self,
        nearest: Stream | WeightedStream,
        explorer: Stream | WeightedStream | None,
        *,
        target: float,
        prior: tuple[float, float],
        seed: int,
    ) -> None:
        """`nearest` gives the number of rows by source that are chosen by their counts, not their order."""
        self._nearest, self._explorer, self.seed = nearest, explorer, seed
        self.target, self.prior = target, prior
        self.batch_size = nearest.batch_size + (explorer.batch_size if explorer else 0)
        self.size = sum(nearest.sizes)
        if self.batch_size > self.size:
            raise DataError(f"a batch of {self.batch_size} prompts cannot be filled from {self.size} rows")

    def batch(self, index: int, counts: RowCounts | None = None, without: Collection[int] = ()) -> list[int]:
        """Return the rows of a batch; those of `without` only where a source has no others."""
        import numpy as np

        explored = [row for row in self._explorer.batch(index) if row not in without] if self._explorer else []
        noise = np.random.Generator(np.random.Philox(key=_key(f"{self.seed}:curriculum:{index}")))
        asked, right = self._counts(counts).asked, self._counts(counts).right
        distance = np.abs(noise.beta(self.prior[0] + right, self.prior[1] + asked - right) - self.target)
        distance[[*explored, *without]] = np.inf
        quotas = self._nearest.quotas(index)
        quotas[quotas.index(max(quotas))] += self.batch_size - sum(quotas) - len(explored)
        chosen, starts = explored, [0, *accumulate(self._nearest.sizes)]
        for start, size, quota in zip(starts, self._nearest.sizes, quotas, strict=False):
            order = np.argsort(distance[start : start + size], kind="stable")
            chosen += [start + int(order[place % size]) for place in range(quota)]
        return [chosen[place] for place in shuffled(range(len(chosen)), f"{self.seed}:places:{index}")]

    def expect(self, counts: RowCounts | None) -> "NDArray[np.float64]":
        """Return each row's mean pass rate by counts and prior: [rows]."""
        found = self._counts(counts)
        rates: NDArray[np.float64] = (found.right + self.prior[0]) / (found.asked + sum(self.prior))
        return rates

    def count(self, counts: RowCounts | None, answers: Iterable[tuple[int, int, int]]) -> RowCounts:
        return self._counts(counts).add(answers)

    def _counts(self, counts: RowCounts | None) -> RowCounts:
        if counts is None:
            return RowCounts.none(self.size)
        if len(counts.asked) != self.size:
            log.warning(
                "the counts of the curriculum are of %d rows, not %d: they begin anew", len(counts.asked), self.size
            )
            return RowCounts.none(self.size)
        return counts


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
