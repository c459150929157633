"""Score Geometry3K responses as EasyR1 and veRL do: the boxed answer, and a thought before it."""

from r1_rewards.types import Score
from r1_rewards.verifiers import math_easyr1


def score(response: str, ground_truth: str, *, format_weight: float = 0.1) -> Score:
    r"""Return 0.9 for the right last `\boxed{…}` and 0.1 for `<think>…</think>…\boxed{…}` (`format_weight`).

    The grade is PRM800K's as in MathRuler: numbers, units dropped, degrees, roots and fractions.

    Example: `score(r"<think>a</think> \boxed{12\sqrt{2}}", r"12 \sqrt 2").value` is 1.0.
    """
    return math_easyr1.weighted(response, ground_truth, format_weight)


def truth_problem(ground_truth: str) -> str | None:
    return math_easyr1.truth_problem(ground_truth)
