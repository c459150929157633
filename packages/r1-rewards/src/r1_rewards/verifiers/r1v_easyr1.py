"""The verdict of EasyR1's `r1v` reward, for comparison with published figures."""

from r1_rewards.reading import prm800k
from r1_rewards.reading.truths import emptied_problem
from r1_rewards.types import Score
from r1_rewards.verifiers.format import has_r1v


def score(response: str, ground_truth: str, *, format_weight: float = 0.5) -> Score:
    """Return 0.5 for the answer and 0.5 for the format (`format_weight`).

    `accuracy` is PRM800K's grade of the first `<answer>` on one line, or of the whole response; `format` is
    `format.has_r1v`.

    Example: `score("<think>a</think><answer>5</answer>", "5").value` is 1.0.
    """
    found = _first_answer(response)
    extracted = response.strip() if found is None else found
    accuracy = float(prm800k.grade(extracted, ground_truth.strip()))
    format_score = float(has_r1v(response))
    overall = (1.0 - format_weight) * accuracy + format_weight * format_score
    return Score(overall, {"overall": overall, "accuracy": accuracy, "format": format_score})


def truth_problem(ground_truth: str) -> str | None:
    return emptied_problem(ground_truth, prm800k.normalise)


def _first_answer(response: str) -> str | None:
    for line in response.split("\n"):
        start = line.find("<answer>")
        end = line.find("</answer>", start + len("<answer>")) if start >= 0 else -1
        if end >= 0:
            return line[start + len("<answer>") : end].strip()
    return None
