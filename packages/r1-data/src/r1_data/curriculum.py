"""Curricula: which rows a run reads, and in what order, by how often the model answers them rightly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from r1_data.stream import Levels
from r1_data.types import DataError, Row

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
