"""The verdict of veRL's `math_reward` on MATH, for comparison with published figures."""

from r1_rewards.reading import hendrycks
from r1_rewards.reading.extract import last_braced
from r1_rewards.reading.truths import blank_problem
from r1_rewards.types import Score


def score(response: str, ground_truth: str) -> Score:
    r"""Return 1 if the last `\boxed{…}` equals the ground truth by the MATH data set's string comparison, else 0.

    `2^{10}` is not 1024 here, and `0.25` not `\frac{1}{4}`: use `math` unless you reproduce figures.

    Example: `score(r"\boxed{0.5}", r"\frac12").value` is 1.0.
    """
    extracted = boxed(response)
    right = extracted is not None and hendrycks.is_equivalent(extracted, ground_truth)
    return Score(float(right), {"overall": float(right), "accuracy": float(right)})


def truth_problem(ground_truth: str) -> str | None:
    return blank_problem(ground_truth)


def boxed(response: str) -> str | None:
    if "\\boxed " in response:
        return response.rsplit("\\boxed ", 1)[1].split("$", 1)[0]
    return last_braced(response, "\\boxed") if "\\boxed" in response else None
