"""Intervals, paired tests and smallest differences. The unit is the row: answers to one row depend on one another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SURE = 1.959963985  # standard deviations of a normal distribution that hold 95 % of it
POWER = 0.841621234  # that hold 80 % of it on one side
LEVEL = 0.05
RESAMPLES, FLIPS, AT_ONCE = 10_000, 20_000, 4_000_000  # the last: numbers drawn at once
SPREAD = 2.4  # a + b of the beta distribution of pass rates of rows: most rows are near 0 or 1

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over rows with its 95 % interval."""

    value: float
    low: float
    high: float
    rows: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The second minus the first of two evaluations of the same rows."""

    mean: Interval
    p: float  # two-sided mid-p of the sign-flip test; of one answer a row, of McNemar's
    p_exact: float  # the conservative exact one
    better: int  # rows in which the second has the higher mean
    worse: int


def wilson(mean: float, count: int) -> Interval:
    """Return the interval of a share (Wilson, J. Am. Stat. Assoc. 22, 209, 1927)."""
    below = 1 + SURE**2 / count
    middle = (mean + SURE**2 / (2 * count)) / below
    half = SURE * math.sqrt(mean * (1 - mean) / count + SURE**2 / (4 * count**2)) / below
    return Interval(mean, max(middle - half, 0.0), min(middle + half, 1.0), count)


def mean_interval(rows: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of the rows' values: for 0 and 1 with Wilson's interval, else with a bootstrap over rows.

    Equal values between 0 and 1 get Wilson's, which is too wide for them, as a bootstrap would show no doubt at all.
    """
    values = np.asarray(rows, np.float64)
    mean = float(values.mean())
    if set(rows) <= {0.0, 1.0} or (np.ptp(values) == 0 and 0 <= mean <= 1):
        return wilson(mean, len(rows))
    return bootstrap(values, seed)


def bootstrap(values: Numbers, seed: int = 0) -> Interval:
    """Return the mean with the percentiles of `RESAMPLES` means over rows that are drawn with replacement."""
    generator, count = np.random.default_rng(seed), len(values)
    size = max(AT_ONCE // count, 1)
    means = [
        values[generator.integers(0, count, (min(size, RESAMPLES - done), count))].mean(1)
        for done in range(0, RESAMPLES, size)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high), count)


# --- two evaluations --------------------------------------------------------------------------------------------------


def compare_rows(first: Sequence[float], second: Sequence[float], step: float | None) -> Difference:
    """Compare the means of the same rows.

    Args:
        step: of which all values are multiples, so that the test is exact; None: signs are drawn.
    """
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    p, exact = sign_flip(np.rint(differences / step).astype(np.int64)) if step else drawn_sign_flip(differences)
    flat = np.ptp(differences) == 0
    mean = float(differences.mean())
    around = Interval(mean, mean, mean, len(first)) if flat else bootstrap(differences)
    return Difference(around, p, exact, int((differences > 0).sum()), int((differences < 0).sum()))


def sign_flip(differences: NDArray[np.int64]) -> tuple[float, float]:
    """Return the mid-p and the exact p of all signs of whole differences; of -1, 0 and 1, McNemar's exact test.

    Under the null hypothesis each sign is as likely as the other. The mid-p counts half the probability of sums as
    large as the observed one (Fagerland, Lydersen and Laake, BMC Med. Res. Methodol. 13, 91, 2013): the exact p of few
    rows is well below its level, and misses true differences.
    """
    sizes, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    chances = np.ones(1)  # of each sum of the positive differences
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        wider = np.zeros(len(chances) + size * count)
        for positive, chance in enumerate(_fair_coins(count)):
            wider[size * positive : size * positive + len(chances)] += chance * chances
        chances = wider
    sums = np.abs(2.0 * np.arange(len(chances)) - int((sizes * counts).sum()))
    return _p_values(sums, chances, abs(int(differences.sum())))


def drawn_sign_flip(differences: Numbers, seed: int = 0) -> tuple[float, float]:
    """Return mid-p and p as `sign_flip`, of any differences, by `FLIPS` drawn signs and the observed ones."""
    generator, count = np.random.default_rng(seed), len(differences)
    size = max(AT_ONCE // count, 1)
    sums = [np.abs(differences.sum())]
    for done in range(0, FLIPS, size):
        signs = generator.integers(0, 2, (min(size, FLIPS - done), count)) * 2 - 1
        sums = [*sums, *np.abs(signs @ differences)]
    rounded = np.round(np.asarray(sums), 9)
    return _p_values(rounded, np.full(len(rounded), 1 / len(rounded)), float(rounded[0]))


def _p_values(sums: Numbers, chances: Numbers, observed: float) -> tuple[float, float]:
    above, same = float(chances[sums > observed].sum()), float(chances[sums == observed].sum())
    if math.isclose(same, 1.0):  # no row differs, so no other sum is possible
        return 1.0, 1.0
    return min(above + same / 2, 1.0), min(above + same, 1.0)


@cache
def _fair_coins(count: int) -> list[float]:
    """Return the probability of 0, 1, … heads."""
    found, ways = [], 1
    for heads in range(count + 1):
        found.append(ways / 2**count)
        ways = ways * (count - heads) // (heads + 1)
    return found


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm, Scand. J. Stat. 6, 65, 1979)."""
    found, largest = [0.0] * len(p), 0.0
    for place, index in enumerate(sorted(range(len(p)), key=lambda one: p[one])):
        largest = max(largest, min(p[index] * (len(p) - place), 1.0))
        found[index] = largest
    return found


# --- before sampling --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How pass rates q of rows are spread: the mean, and the mean of q (1 - q)."""

    mean: float
    within: float

    @classmethod
    def prior(cls, mean: float) -> "Difficulty":
        """Return that of a beta distribution with a + b = SPREAD."""
        return cls(mean, mean * (1 - mean) * SPREAD / (SPREAD + 1))

    @classmethod
    def of_rows(cls, means: Sequence[float], k: int) -> "Difficulty":
        """Return that of the means of k answers a row; of one answer, the prior with their mean."""
        values = np.asarray(means, np.float64)
        mean = float(values.mean())
        return cls.prior(mean) if k < 2 else cls(mean, float((values * (1 - values)).mean()) * k / (k - 1))


def smallest_difference(difficulty: Difficulty, rows: int, k: int) -> float:
    """Return the difference that a paired comparison of k answers a row shows with 80 % power at 5 %; inf: none.

    The better model's pass rates are q + c (1 - q), or the worse one's are q (1 - c), whichever has more room. A row's
    difference then varies by both models' answers and by c's effect; quantiles are those of Student's distribution.
    """
    room = max(difficulty.mean, 1 - difficulty.mean)  # 1 - q on average, where q is the smaller of both pass rates
    between = difficulty.mean * (1 - difficulty.mean) - difficulty.within  # variance of q
    if rows < 3 or not 0 < room <= 1:
        return math.inf
    needed = (_student(SURE, rows - 1) + _student(POWER, rows - 1)) / math.sqrt(rows)

    def shown(effect: float) -> bool:
        raised = (1 - effect) * (difficulty.within + effect * (room**2 + between))
        variance = (difficulty.within + raised) / k + effect**2 * between
        return effect * room >= needed * math.sqrt(max(variance, 0.0))

    low, high = 0.0, 1.0
    if not shown(high):
        return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if shown(middle) else (middle, high)
    return high * room


def _student(normal: float, freedom: int) -> float:
    """Return the quantile of Student's distribution that belongs to one of the normal distribution.

    By an expansion in 1/freedom (Abramowitz and Stegun 26.7.5).
    """
    first = (normal**3 + normal) / 4
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    return normal + first / freedom + second / freedom**2
