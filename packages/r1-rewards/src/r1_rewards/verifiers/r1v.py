"""Score an R1-V answer, `<think>…</think><answer>…</answer>`, by the answer in the tag."""

from r1_rewards.types import Score
from r1_rewards.verifiers import math
from r1_rewards.verifiers.format import has_r1v


def score(response: str, ground_truth: str) -> Score:
    """Return 0.5 for the answer and 0.5 for the format (Deep-Agent/R1-V, whose two rewards are summed).

    `accuracy` is 1 if the first `<answer>` equals that of the ground truth (`<answer> 3 </answer>`, or the bare answer)
    as mathematics or as words; a response without tags is compared as a whole. Numbers outside the tag never count.
    `format` is `format.has_r1v`.

    Example: `score("<think>1, 2, 3</think><answer>3</answer>", "<answer> 3 </answer>").value` is 1.0.
    """
    body, truth = answer_body(response), answer_body(ground_truth)
    accuracy = float(bool(body and truth) and (body == truth or math.equal(str(body), str(truth))))
    format_score = float(has_r1v(response))
    overall = 0.5 * accuracy + 0.5 * format_score
    return Score(overall, {"overall": overall, "accuracy": accuracy, "format": format_score})


def truth_problem(ground_truth: str) -> str | None:
    return None if answer_body(ground_truth) else f"the truth {ground_truth[:80]!r} has no answer"


def answer_body(text: str) -> str | None:
    start = text.find("<answer>")
    end = text.find("</answer>", start + len("<answer>")) if start >= 0 else -1
    if end >= 0:
        return text[start + len("<answer>") : end].strip()
    return None if "<think>" in text else text.strip()
