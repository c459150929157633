"""The reward of LMM-R1's mathematics server: 1 for the answer and 0.5 for the tags (arXiv 2503.07536)."""

from r1_rewards.reading import extract
from r1_rewards.types import Score
from r1_rewards.verifiers import math


def score(response: str, ground_truth: str) -> Score:
    r"""Return accuracy (1) plus format (0.5).

    The answer must be in a `\boxed{…}`, or in a `$…$` after the word "answer". `format` is 0.5 for exactly one think
    block and one answer block without blanks between or around them. An empty response scores 0.

    Example: `score(r"<think>1+1</think><answer>$\boxed{2}$</answer>", "2").value` is 1.5.
    """
    extracted = extract.boxed(response)
    if extracted is None:
        extracted = extract.anchored_formula(response)
    truth = extract.boxed(ground_truth)
    accuracy = float(extracted is not None and math.equal(extracted, ground_truth if truth is None else truth))
    format_score = 0.5 * has_format(response)
    overall = accuracy + format_score
    return Score(overall, {"overall": overall, "accuracy": accuracy, "format": format_score})


def truth_problem(ground_truth: str) -> str | None:
    return math.truth_problem(ground_truth)


def has_format(response: str) -> bool:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return (
        all(response.count(tag) == 1 for tag in tags)
        and response.startswith("<think>")
        and "</think><answer>" in response
        and response.endswith("</answer>")
    )
