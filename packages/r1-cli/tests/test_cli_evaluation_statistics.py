"""The statistics of evaluations, against scipy 1.17 and statsmodels 0.14, whose values are written here."""

import math

import numpy as np
import pytest

from r1_cli.runs.statistics import (
    Difficulty,
    bootstrap,
    compare_rows,
    drawn_sign_flip,
    holm,
    mean_interval,
    sign_flip,
    smallest_difference,
    wilson,
)

# (rows right only in the first, only in the second) -> exact p of McNemar's test, and its mid-p
MCNEMAR = [(1, 5, 0.21875, 0.125), (3, 11, 0.057373046875, 0.03515625), (10, 25, 0.0166738478, 0.0113309842),
           (0, 4, 0.125, 0.0625), (60, 95, 0.0061328926, 0.0049129646)]  # fmt: skip
WILSON = [(0, 10, 0.0, 0.27753279986), (3, 30, 0.03459988875, 0.25621082579), (250, 500, 0.45634126530, 0.54365873470),
          (1319, 1319, 0.99709605501, 1.0)]  # fmt: skip
DIFFERENCES = [2, -1, 3, 0, 1, 4, -2, 1, 1, 3, -1, 2]  # permutation_test of all 4,096 signs: p = 0.0927734375
# Quarters of right answers a row; scipy's bootstrap of 20,000: 0.63125 to 0.778125.
QUARTERS = [0] * 5 + [1] * 12 + [2] * 12 + [3] * 14 + [4] * 37
# rows, mean pass rate: MATH-500, AIME 2024 and GPQA-Diamond
SUITES = {"AIME24": (30, 0.3), "GPQA": (198, 0.45), "MATH-500": (500, 0.8)}


@pytest.mark.parametrize(("lost", "won", "exact", "mid"), MCNEMAR)
def test_one_answer_a_row_is_compared_by_mcnemars_exact_test(lost: int, won: int, exact: float, mid: float) -> None:
    first, second = [1.0] * lost + [0.0] * won + [1.0] * 20, [0.0] * lost + [1.0] * won + [1.0] * 20
    found = compare_rows(first, second, 1.0)
    assert (found.p_exact, found.p) == pytest.approx((exact, mid), abs=1e-9)
    assert (found.better, found.worse) == (won, lost)


@pytest.mark.parametrize(("right", "rows", "low", "high"), WILSON)
def test_a_share_has_wilsons_interval(right: int, rows: int, low: float, high: float) -> None:
    found = mean_interval([1.0] * right + [0.0] * (rows - right))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    assert found == wilson(right / rows, rows)


def test_several_answers_a_row_are_compared_over_all_signs() -> None:
    assert sign_flip(np.asarray(DIFFERENCES))[1] == pytest.approx(0.0927734375, abs=1e-12)
    assert sign_flip(np.zeros(2, int)) == drawn_sign_flip(np.zeros(2)) == (1.0, 1.0)
    drawn = drawn_sign_flip(np.asarray(DIFFERENCES) / 4)
    assert drawn == pytest.approx(sign_flip(np.asarray(DIFFERENCES)), abs=0.006)


def test_a_bootstrap_over_rows_gives_the_interval_of_several_answers() -> None:
    values = np.asarray(QUARTERS) / 4
    found = mean_interval(values.tolist())
    assert (found.low, found.high) == pytest.approx((0.63125, 0.778125), abs=0.004)
    assert mean_interval([0.75] * 30) == wilson(0.75, 30)
    assert found == bootstrap(values)


def test_several_comparisons_are_adjusted_as_holm_did() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005, 0.8]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.8])


def simulate(rows: int, mean: float, k: int, effect: float, count: int = 1000) -> float:
    """Return the share of simulated comparisons that are significant at 5 %."""
    generator, least = np.random.default_rng(7), min(mean, 1 - mean)
    rates = generator.beta(2.4 * least, 2.4 * (1 - least), (count, rows))
    raised = generator.binomial(k, rates + effect / (1 - least) * (1 - rates))
    differences = raised - generator.binomial(k, rates)
    return float(np.mean([sign_flip(one)[0] < 0.05 for one in differences]))


@pytest.mark.parametrize(
    ("suite", "k"),
    [
        ("AIME24", 4),
        ("AIME24", 16),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("GPQA", 1), ("MATH-500", 1), ("MATH-500", 4))),
    ],
)
def test_a_model_against_itself_is_significant_in_5_percent_and_against_the_smallest_difference_in_80(
    suite: str, k: int
) -> None:
    rows, mean = SUITES[suite]
    assert simulate(rows, mean, k, 0.0) == pytest.approx(0.05, abs=0.015)
    smallest = smallest_difference(Difficulty.prior(mean), rows, k)
    assert simulate(rows, mean, k, smallest) == pytest.approx(0.8, abs=0.03)


def test_smallest_differences_shrink_with_answers_and_rows_and_follow_stored_answers() -> None:
    cases = [(name, k, *suite) for name, suite in SUITES.items() for k in (1, 4)]
    found = {(name, k): smallest_difference(Difficulty.prior(p), n, k) for name, k, n, p in cases}
    rounded = {key: round(value, 3) for key, value in found.items()}
    assert rounded == {("AIME24", 1): 0.326, ("AIME24", 4): 0.162, ("GPQA", 1): 0.123, ("GPQA", 4): 0.061,
                       ("MATH-500", 1): 0.065, ("MATH-500", 4): 0.031}  # fmt: skip
    # Rows that are all as hard vary more from one answer to the next than the prior's.
    assert smallest_difference(Difficulty.of_rows([0.25, 0.75] * 250, 4), 500, 4) > found["MATH-500", 4]
    assert math.isinf(smallest_difference(Difficulty.prior(0.5), 2, 1))
