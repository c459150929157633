"""Score a final answer as text: exactly, or without case, punctuation and articles."""

import re
import string
from collections.abc import Sequence

from r1_rewards.reading import extract
from r1_rewards.types import Score

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


def score(response: str, ground_truth: str | Sequence[str], *, exact: bool = False) -> Score:
    r"""Return 1 if the response's final answer is the truth, or one of several truths, as normalised text, else 0.

    The answer is the last `<answer>…</answer>`, `\boxed{…}` or "Answer: x", or else the whole response. See
    `normalise`; with `exact` only blanks around the answer do not matter.

    Example: `score("<answer>The Eiffel Tower.</answer>", "eiffel tower").value` is 1.0.
    """
    truths = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    extracted = _final_answer(response)
    prepare = str.strip if exact else normalise
    right = prepare(extracted) in {prepare(truth) for truth in truths}
    return Score(float(right), {"overall": float(right), "accuracy": float(right)})


def normalise(text: str) -> str:
    """Return `text` in lower case without ASCII punctuation, articles and double blanks (SQuAD, arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _final_answer(response: str) -> str:
    for find in (extract.tagged, extract.boxed, extract.stated):
        extracted = find(response)
        if extracted is not None:
            return extracted
    return response
