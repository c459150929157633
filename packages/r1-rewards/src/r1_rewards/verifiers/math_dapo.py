"""The verdict of veRL's `math_dapo`, for comparison with published figures."""

from r1_rewards.reading.extract import last_braced
from r1_rewards.types import Score
from r1_rewards.verifiers import dapo

STRICT_TAIL = 100  # characters


def score(response: str, ground_truth: str, *, strict_box: bool = False) -> Score:
    r"""Return 1 for a right answer, else -1; `accuracy` is the same as 1 or 0.

    The answer is the text after the last "Answer:" in the final 300 characters, normalised (`dapo.normalise`); with
    `strict_box`, the last `\boxed{…}` in the final 100, as it stands. 12,34 is 1234 here, and 0.5 is not 1/2: use
    `math` unless you reproduce figures.

    Example: `score("Answer: 12,34", "1234").value` is 1.0.
    """
    if strict_box:
        right = last_braced(response[-STRICT_TAIL:], r"\boxed") == ground_truth
    else:
        right = dapo.normalise(dapo.final_answer(response)) == dapo.normalise(ground_truth)
    value = 1.0 if right else -1.0
    return Score(value, {"overall": value, "accuracy": float(right)})


def truth_problem(ground_truth: str) -> str | None:
    return dapo.truth_problem(ground_truth)
