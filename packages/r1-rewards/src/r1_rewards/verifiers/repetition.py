"""Penalize responses that repeat themselves."""

import re
from collections import Counter

from r1_rewards.types import Score

TRUTH_IS_ANSWER = False  # it is not looked at

# A character of a script without blanks counts as a word.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\s_぀-ヿ㐀-䶿一-鿿가-힯]+")


def score(
    response: str, ground_truth: str = "", *, ngram: int = 10, limit: int | None = None, factor: float = 1.0
) -> Score:
    """Return a penalty from 0 down to -`factor` for repeated n-grams of `ngram` words.

    `repeated` is the share of n-grams that occurred before; the penalty is proportional to it. With a `limit` it is the
    whole `factor` once an n-gram occurs `limit` times, else 0 (RLPR's rule with limit 10). Words are separated by
    blanks and underscores. Linear in the length.

    Example: `score("a b a b a b", ngram=2).value` is -0.6.
    """
    if not 1 <= ngram <= 100 or (limit is not None and limit < 2):
        raise ValueError(f"ngram must be from 1 to 100 and limit at least 2, got {ngram} and {limit}")
    counts = Counter(runs(response, ngram))
    total = sum(counts.values())
    repeated = 1.0 - len(counts) / total if total else 0.0
    most = max(counts.values(), default=0)
    punished = repeated if limit is None else float(most >= limit)
    value = -factor * punished if punished else 0.0
    return Score(value, {"overall": value, "repeated": repeated, "most_repeated": float(most)})


def runs(text: str, length: int) -> list[tuple[str, ...]]:
    words = _WORD.findall(text)
    return list(zip(*(words[start:] for start in range(length)), strict=False)) if len(words) >= length else []
