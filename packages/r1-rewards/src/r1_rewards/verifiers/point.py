"""Score a point by whether it lies in the true box."""

from r1_rewards.types import Score
from r1_rewards.verifiers.box import last_box, last_point

TRUTH_IS_ANSWER = False  # but a box, in which the answer has to be


def score(response: str, ground_truth: str) -> Score:
    """Return 1 if the response's last point `(x, y)` or `[x, y]` lies in or on the true box `[x1, y1, x2, y2]`, else 0.

    The point is in the ground truth's units. A box instead of a point scores 0. Raises ValueError if the ground truth
    has no box.

    Example: `score("Click at (5, 3).", "[0, 0, 10, 10]").value` is 1.0.
    """
    truth = last_box(ground_truth)
    if truth is None:
        raise ValueError(truth_problem(ground_truth))
    point = last_point(response)
    inside = point is not None and truth[0] <= point[0] <= truth[2] and truth[1] <= point[1] <= truth[3]
    return Score(float(inside), {"overall": float(inside), "accuracy": float(inside)})


def truth_problem(ground_truth: str) -> str | None:
    if last_box(ground_truth) is None:
        return f"the truth {ground_truth[:80]!r} has no box; write it as [x1, y1, x2, y2]"
    return None
