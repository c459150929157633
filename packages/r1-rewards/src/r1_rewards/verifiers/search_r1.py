"""The verdict of veRL's `search_r1_like_qa_em`, for comparison with published figures."""

from r1_rewards.reading import extract
from r1_rewards.reading.truths import emptied_problem
from r1_rewards.types import Score
from r1_rewards.verifiers import text

MAX_TAGS = 10


def score(response: str, ground_truth: str) -> Score:
    """Return 1 if the last `<answer>…</answer>` is the ground truth as normalised text, else 0.

    With more than ten opening or closing tags a right answer scores 0.25 (Search-R1, arXiv 2503.09516). See
    `text.normalise_squad`.

    Example: `score("<answer>The Nile</answer>", "nile").value` is 1.0.
    """
    extracted = extract.tagged(response)
    accuracy = float(extracted is not None and text.normalise_squad(extracted) == text.normalise_squad(ground_truth))
    hedged = max(response.count("<answer>"), response.count("</answer>")) > MAX_TAGS
    value = accuracy / 4 if hedged else accuracy
    return Score(value, {"overall": value, "accuracy": accuracy})


def truth_problem(ground_truth: str) -> str | None:
    return emptied_problem(ground_truth, text.normalise_squad)
