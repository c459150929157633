"""The verdict of EasyR1's `math` reward, for comparison with published figures."""

import re

from r1_rewards.reading import prm800k
from r1_rewards.reading.extract import last_braced
from r1_rewards.reading.truths import emptied_problem
from r1_rewards.types import Score
from r1_rewards.verifiers.format import has_think_box

_UNBOXED = "None"  # what a response without a box says, to MathRuler
_SIGN = re.compile(r"([<>/])")


def score(response: str, ground_truth: str, *, format_weight: float = 0.1) -> Score:
    r"""Return 0.9 for the last `\boxed{…}` and 0.1 for a thought before it (`format_weight`).

    `accuracy` is PRM800K's grade as in MathRuler (`prm800k.grade`); `format` is `format.has_think_box`. Blanks around
    `<`, `>` and `/` are ignored. `2^{10}` is not 1024 here: use `math` unless you reproduce figures.

    Example: `score(r"<think>a</think> \boxed{5}", "5").value` is 1.0.
    """
    response = without_blanks_around_tags(response)
    return weighted(response, ground_truth, format_weight)


def truth_problem(ground_truth: str) -> str | None:
    if prm800k.grade(_UNBOXED, ground_truth):
        return f"the truth {ground_truth[:80]!r} is what a response without a box counts as: write it another way"
    return emptied_problem(ground_truth, prm800k.normalise)


def weighted(response: str, ground_truth: str, format_weight: float) -> Score:
    accuracy = float(prm800k.grade(boxed(response), ground_truth))
    format_score = float(has_think_box(response))
    overall = (1.0 - format_weight) * accuracy + format_weight * format_score
    return Score(overall, {"overall": overall, "accuracy": accuracy, "format": format_score})


def boxed(response: str) -> str:
    content = last_braced(response, "\\boxed")
    return _UNBOXED if content is None else content.strip()


def without_blanks_around_tags(response: str) -> str:
    parts = _SIGN.split(response)
    last = len(parts) - 1
    for place in range(0, len(parts), 2):
        if place > 0:
            parts[place] = parts[place].lstrip()
        if place < last:
            parts[place] = parts[place].rstrip()
    return "".join(parts)
