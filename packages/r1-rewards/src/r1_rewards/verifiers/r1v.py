"""Score an R1-V answer: `<think>…</think><answer>…</answer>`, and the answer in the tag must be right."""

from r1_rewards.types import Score
from r1_rewards.verifiers import math
from r1_rewards.verifiers.format import has_r1v


def score(response: str, ground_truth: str) -> Score:
    """Return accuracy and format, equally weighted, in the manner of R1-V (Deep-Agent/R1-V, two summed rewards).

    `accuracy` is 1 if the body of the first `<answer>` equals that of the truth (`<answer> 3 </answer>`, or the bare
    answer), as mathematics or as the same words; a response without any tag is compared whole. Numbers outside the tag
    never count, as they do in the original. `format` see `format.has_r1v`. `overall`, the value, is 0.5 of each.

    Example: `score("<think>1, 2, 3</think><answer>3</answer>", "<answer> 3 </answer>").value` is 1.0.
    """
    body, truth = answer_body(response), answer_body(ground_truth)
    accuracy = float(bool(body and truth) and (body == truth or math.equal(str(body), str(truth))))
    format_score = float(has_r1v(response))
    overall = 0.5 * accuracy + 0.5 * format_score
    return Score(overall, {"overall": overall, "accuracy": accuracy, "format": format_score})


def truth_problem(ground_truth: str) -> str | None:
    """Return why no response can be right for a truth, or None."""
    return None if answer_body(ground_truth) else f"the truth {ground_truth[:80]!r} has no answer"


def answer_body(text: str) -> str | None:
    """Return the stripped body of the first `<answer>` block; without one, the whole text unless it has a `<think>`."""
    start = text.find("<answer>")
    end = text.find("</answer>", start + len("<answer>")) if start >= 0 else -1
    if end >= 0:
        return text[start + len("<answer>") : end].strip()
    return None if "<think>" in text else text.strip()
