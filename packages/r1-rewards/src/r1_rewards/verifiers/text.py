"""Score a final answer as text: exactly, or without case, punctuation and articles."""

import re
import string
import unicodedata
from collections.abc import Sequence

from r1_rewards.reading import extract
from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.reading.truths import blank_problem, read_truths
from r1_rewards.types import Score

MUCH_LONGER = 10_000  # characters; what exceeds ten times a truth by more is another text

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_LEADING_ARTICLES = re.compile(r"\b(?:a|an|the)\b(?=\s+\w)")  # "vitamin A" is not "vitamin"
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-‐‑](?=[^\W\d_])")
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
# Signs that say which number, name or formula it is: 1.5, -5, 1/2, 3:30, C#, C++, .NET, x<5, 5%.
_MEANT = re.compile(
    r"(?<=[0-9])[.,/:^*%](?=[0-9])|(?<![0-9.])\.(?=[0-9])|(?<![\w)])[-−](?=\.?[0-9])|(?<=[a-z])[+#]{1,2}(?![\w+#])"
    r"|(?<![\w.])\.(?=[a-z])|[<>=]|(?<=[0-9a-z])[-+*/^](?=[0-9])|(?<=[0-9])[-+*/^](?=[a-z])|(?<=[a-z])[+*^](?=[a-z])"
)
_ODD = re.compile(r"[^\w\s]")


def score(response: str, ground_truth: str | Sequence[str], *, exact: bool = False) -> Score:
    r"""Return 1 if the final answer is the ground truth, or one of several, as normalised text, else 0.

    The answer is the last `<answer>…</answer>`, `\boxed{…}` or "Answer: x", or else the whole response. See
    `normalise`; `exact` ignores only surrounding blanks. An empty answer is wrong. Several ground truths are a list, or
    its JSON. Raises ValueError for a blank ground truth.

    Example: `score("<answer>The Eiffel Tower.</answer>", "eiffel tower").value` is 1.0.
    """
    extracted = _final_answer(response).strip()
    written = _as_it_stands if exact else _ways
    longest = MUCH_LONGER + 10 * max(map(len, read_truths(ground_truth)))
    truths = {way for truth in read_truths(ground_truth) for way in written(truth)}
    right = 0 < len(extracted) <= longest and not truths.isdisjoint(written(extracted))
    reason = "the same text" if right else "another text" if extracted else "there is no answer"
    return Score(float(right), {"overall": float(right), "accuracy": float(right)}, extracted=extracted, reason=reason)


def truth_problem(ground_truth: str) -> str | None:
    return blank_problem(ground_truth)


def _as_it_stands(text: str) -> set[str]:
    return {text.strip()}


def _ways(text: str) -> set[str]:
    return {normalise(text), normalise(_HYPHEN.sub(" ", text))}


def normalise(text: str) -> str:
    """Return `text` in lower case without punctuation, articles and double blanks.

    Signs that distinguish numbers or names stay: "1.5", "-5", "1/2", "C#". So does a text of only articles or signs:
    "A", "%".
    """
    lower = _THOUSANDS.sub("", unicodedata.normalize("NFC", plain_characters(text)).casefold())
    kept = {match.start() for match in _MEANT.finditer(lower)}
    kept |= {place + 1 for place in kept if lower[place : place + 2] in ("++", "##")}
    plain = _ODD.sub(lambda match: match[0] if match.start() in kept or _is_symbol(match[0]) else "", lower)
    return " ".join(_LEADING_ARTICLES.sub(" ", plain).split()) or " ".join(plain.split()) or lower.strip()


def _is_symbol(sign: str) -> bool:
    return not sign.isascii() and not unicodedata.category(sign).startswith("P")


def normalise_squad(text: str) -> str:
    """Return `text` in lower case without ASCII punctuation, articles and double blanks (SQuAD, arXiv 1606.05250)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _final_answer(response: str) -> str:
    response = extract.after_thought(response)
    for find in (extract.tagged, extract.boxed, extract.stated):
        extracted = find(response)
        if extracted is not None:
            return extracted
    return response
