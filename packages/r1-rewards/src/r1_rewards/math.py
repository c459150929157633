"""Score a mathematical answer: is it equal to the truth, however it is written?

Equality is decided by text, then by exact numbers, and only then by Math-Verify (extra `math`), which is imported at
first use.
"""

import logging
import re

from r1_rewards import extract
from r1_rewards.guards import refusal
from r1_rewards.notation import normalise, quantity
from r1_rewards.number import parse_number
from r1_rewards.types import Score

MISSING = "the math verifier needs Math-Verify: install it with `pip install 'r1-rewards[math]'`"

_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]{2,}")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_MAX_PROSE_WORDS = 4  # more, and it is a sentence, in which Math-Verify would pick any number
_IMPROPER_COMMAS = re.compile(r"[0-9]+(?:,[0-9]+)+")
_PROPER_COMMAS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def score(response: str, ground_truth: str) -> Score:
    r"""Score a response by its final answer.

    `accuracy` is 1 if the final answer (see `extract.final_answer`) equals the truth, which may itself stand in a
    solution with a box; `format` is 1 if the response has a `\boxed{…}`; `overall`, the value, is the accuracy.

    Hostile answers (`9**9**9`, huge factorials, very long or deeply nested text) are wrong without being computed;
    an expression that is merely hard can still take long, so train with `load("math", …)`, whose workers have a
    deadline. Raises ImportError where Math-Verify is needed and missing.

    Example: `score(r"so it is \boxed{\frac{2}{4}}.", "0.5").value` is 1.0.
    """
    answer = extract.final_answer(response)
    truth = extract.boxed(ground_truth)
    accuracy = float(answer is not None and equal(answer, ground_truth if truth is None else truth))
    boxed = float(extract.boxed(response) is not None)
    return Score(accuracy, {"overall": accuracy, "accuracy": accuracy, "format": boxed})


def equal(answer: str, truth: str) -> bool:
    r"""Return whether two answers, without the text around them, mean the same.

    Not symmetric: "x = 5" answers "5", and "(3, \infty)" may be answered as "x > 3".
    """
    if answer.strip() == truth.strip() != "":
        return True
    if refusal(answer) or refusal(truth):
        return False
    answer, truth = normalise(answer), normalise(truth)
    if not answer or not truth:
        return False
    if answer.replace(" ", "") == truth.replace(" ", ""):
        return True
    decided = _equal_quantities(answer, truth)
    if decided is None:
        decided = _equal_words(answer, truth)
    # What normalising wrote out may be hostile where the original was not ("9²²²" becomes 9^{2}^{2}^{2}).
    if decided is None and (refusal(answer) or refusal(truth)):
        return False
    return _verify(answer, truth) if decided is None else decided


def _equal_quantities(answer: str, truth: str) -> bool | None:
    """Compare numbers with or without units; None where this cannot decide."""
    answer_number, answer_unit = quantity(answer) or (answer, "")
    truth_number, truth_unit = quantity(truth) or (truth, "")
    if answer_unit and truth_unit and answer_unit != truth_unit:
        return False
    if _miswritten_number(answer_number) != _miswritten_number(truth_number):
        return False
    left, right = parse_number(answer_number), parse_number(truth_number)
    if left is None or right is None:
        return None
    if left == right:
        return True
    if left.denominator == 1 == right.denominator and "%" not in answer_number + truth_number:
        return False
    return _verify(answer_number, truth_number)  # Math-Verify allows for rounding at the sixth decimal


def _miswritten_number(text: str) -> bool:
    """Whether commas stand where no thousands end: "12,34" is a list or a mistake, not 1234."""
    return bool(_IMPROPER_COMMAS.fullmatch(text)) and not _PROPER_COMMAS.fullmatch(text)


def _equal_words(answer: str, truth: str) -> bool | None:
    """Compare plain words as text, lest "tac" count as the product c·a·t; None where neither is text."""
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(truth):
        return _plain_words(answer) == _plain_words(truth)
    if len(_PROSE_WORD.findall(answer)) > _MAX_PROSE_WORDS:
        return False
    return None


def _plain_words(text: str) -> str:
    return _ARTICLE.sub("", " ".join(text.casefold().split()), count=1)


def _verify(answer: str, truth: str) -> bool:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    # Its own time limits need SIGALRM, which only a main thread has; the pool's deadline takes their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(rf"\boxed{{{truth}}}", parsing_timeout=None)
    predicted = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    return bool(verify(gold, predicted, allow_set_relation_comp=True, timeout_seconds=None))
