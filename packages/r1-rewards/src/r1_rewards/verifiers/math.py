"""Score a mathematical final answer: is it equal to the truth, however it is written?

Equality is decided by text, then by exact numbers, and only then by Math-Verify (extra `math`), which is imported at
first use.
"""

import logging
import re
from fractions import Fraction
from typing import Any

from r1_rewards.reading import extract
from r1_rewards.reading.guards import refusal
from r1_rewards.reading.notation import normalise, quantity, without_emphasis
from r1_rewards.reading.number import parse_number
from r1_rewards.reading.units import Unit
from r1_rewards.types import Score

MISSING = "the math verifier needs Math-Verify: install it with `pip install 'r1-rewards[math]'`"

_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]{2,}")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_MAX_PROSE_WORDS = 4  # more, and it is a sentence, in which Math-Verify would pick any number
_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s?(?:\\times|\\cdot)\s?10\s?\^\s?\{?(-?[0-9]{1,3})\}?")
_SEPARATE_NUMBERS = re.compile(r"-?[0-9.]+(?:\s+[0-9.]+)+")
_NUMERAL = re.compile(r"([0-9A-Za-z]{1,200})_\{?([0-9]{1,2})\}?")
_SPACED_COMMA = re.compile(r",\s")  # a list, where "32,349" is a number
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,(?:[0-9]{2}|[0-9]{4,})")
_DECIMAL_POINT = re.compile(r"-?[0-9]+\.[0-9]+")
_IMPROPER_COMMAS = re.compile(r"[0-9]+(?:,[0-9]+)+")
_BLANKS = re.compile(r"(?<![0-9,])\s+|\s+(?![0-9])")
_OPTION = re.compile(r"[A-J]")
_CHOSEN = re.compile(r"\(?([A-J])(?:\)|[.:](?=\s|$)|$)")  # "A. Paris", "(A)", "A"
_PROPER_COMMAS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def score(response: str, ground_truth: str, *, digits: int = 6, strict: bool = True) -> Score:
    r"""Score a response by its final answer.

    `accuracy` is 1 if the final answer (see `extract.final_answer`) equals the truth, which may itself stand in a
    solution with a box or a formula; `format` is 1 if the response has a `\boxed{…}`; `overall`, the value, is the
    accuracy. For `digits` and `strict` see `equal`.

    Hostile responses (`9**9**9`, huge factorials, very long or deeply nested text) are wrong without being computed;
    an expression that is merely hard can still take long, so train with `load("math", …)`, whose workers have a
    deadline. Raises ImportError where Math-Verify is needed and missing.

    Example: `score(r"so it is \boxed{\frac{2}{4}}.", "0.5").value` is 1.0.
    """
    truth = _truth(ground_truth)
    candidates = (extract.final_answer(response), extract.boxed_list(response))
    accuracy = float(
        any(extracted is not None and equal(extracted, truth, digits=digits, strict=strict) for extracted in candidates)
    )
    boxed = float(extract.boxed(response) is not None)
    return Score(accuracy, {"overall": accuracy, "accuracy": accuracy, "format": boxed})


def equal(extracted: str, truth: str, *, digits: int = 6, strict: bool = True) -> bool:
    r"""Return whether a final answer and a truth, without the text around them, mean the same.

    Decimal numbers that are not exactly equal count as equal if they agree after rounding to `digits` decimals.
    `strict=False` lets variables have other names and sets be tuples. Not symmetric: "x = 5" is right for "5", and
    "x > 3" for "(3, \infty)".
    """
    if extracted.strip() == truth.strip() != "":
        return True
    extracted = without_emphasis(extracted)
    if refusal(extracted) or refusal(truth):
        return False
    extracted, truth = normalise(extracted), normalise(truth)
    if not extracted or not truth:
        return False
    if _packed(extracted) == _packed(truth):
        return True
    if _OPTION.fullmatch(truth) and (option := _CHOSEN.match(extracted)):
        return option[1] == truth
    decided = _equal_numerals(extracted, truth)
    decided = _equal_quantities(extracted, truth, digits) if decided is None else decided
    decided = _equal_words(extracted, truth) if decided is None else decided
    # What normalising wrote out may be hostile where the original was not ("9²²²" becomes 9^{2}^{2}^{2}).
    if decided is None and (refusal(extracted) or refusal(truth)):
        return False
    return _verify(extracted, truth, digits, strict) if decided is None else decided


def _truth(ground_truth: str) -> str:
    """Return what a truth says: its boxes as a list, its box, a formula at the end of a text, or the whole."""
    found = extract.boxed_list(ground_truth) or extract.boxed(ground_truth)
    if found is None and "$" in ground_truth:
        found = extract.formulas(ground_truth)
    return ground_truth if found is None else found


def _packed(text: str) -> str:
    """Drop blanks, but not before digits after a digit or comma: "32, 349" is a list and "32,349" is a number."""
    return _BLANKS.sub("", text)


def _equal_quantities(extracted: str, truth: str, digits: int) -> bool | None:
    """Compare numbers with or without units; None where this cannot decide."""
    extracted_number, extracted_unit = quantity(extracted) or (extracted, "")
    truth_number, truth_unit = quantity(truth) or (truth, "")
    if _SPACED_COMMA.search(extracted_number) or _SPACED_COMMA.search(truth_number):
        return None
    left, right = _number(extracted_number, truth_number), _number(truth_number, extracted_number)
    if left is None or right is None:
        miswritten = _miswritten_number(extracted_number if left is None else truth_number)
        return False if miswritten and (left is None) != (right is None) else None
    if isinstance(extracted_unit, Unit) and isinstance(truth_unit, Unit) and extracted_unit != truth_unit:
        return extracted_unit.kind == truth_unit.kind and left * extracted_unit.factor == right * truth_unit.factor
    if extracted_unit and truth_unit and extracted_unit != truth_unit:
        return False
    if left == right:
        return True
    if left.denominator == 1 == right.denominator and "%" not in extracted_number + truth_number:
        return False
    return _verify(extracted_number, truth_number, digits)  # Math-Verify allows for rounding


def _number(text: str, other: str) -> Fraction | None:
    """Read a number; a comma with other than three digits after it is a decimal one if `other` has decimals too."""
    if _SCIENTIFIC.fullmatch(text):
        text = _SCIENTIFIC.sub(r"\1e\2", text)
    elif _DECIMAL_COMMA.fullmatch(text) and (_DECIMAL_POINT.fullmatch(other) or _DECIMAL_COMMA.fullmatch(other)):
        text = text.replace(",", ".")
    return None if _SEPARATE_NUMBERS.fullmatch(text) else parse_number(text)


def _miswritten_number(text: str) -> bool:
    """Whether a text looks like one number but is not: "12,34" is a list or a mistake, and not 1234."""
    improper = _IMPROPER_COMMAS.fullmatch(text) and not _PROPER_COMMAS.fullmatch(text)
    return bool(improper or _SEPARATE_NUMBERS.fullmatch(text))


def _equal_numerals(extracted: str, truth: str) -> bool | None:
    """Compare two numbers with their bases, as in "101_2"; None for anything else."""
    left, right = _NUMERAL.fullmatch(extracted), _NUMERAL.fullmatch(truth)
    if left is None or right is None:
        return None
    try:
        return int(left[1], int(left[2])) == int(right[1], int(right[2]))
    except ValueError:
        return False


def _equal_words(extracted: str, truth: str) -> bool | None:
    """Compare plain words as text, lest "tac" count as the product c·a·t; None where neither is text."""
    if _WORDS.fullmatch(extracted) and _WORDS.fullmatch(truth):
        return _plain_words(extracted) == _plain_words(truth)
    if len(_PROSE_WORD.findall(extracted)) > _MAX_PROSE_WORDS:
        return False
    return None


def _plain_words(text: str) -> str:
    return _ARTICLE.sub("", " ".join(text.casefold().split()), count=1)


def _verify(extracted: str, truth: str, digits: int, strict: bool = True) -> bool:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    # Its own time limits need SIGALRM, which only a main thread has; the pool's deadline takes their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Only LaTeX: Math-Verify hands what it takes for a plain expression to SymPy's parse_expr, which evaluates.
    # The whole box or nothing: without this it would take any fraction out of an unreadable answer.
    targets = [LatexExtractionConfig(try_extract_without_anchor=False)]
    gold, predicted = (
        [_with_imaginary_unit(item) for item in parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None)]
        for text in (truth, extracted)
    )
    return bool(verify(gold, predicted, digits, strict=strict, allow_set_relation_comp=True, timeout_seconds=None))


def _with_imaginary_unit(parsed: Any) -> Any:
    """Read a free variable i as the imaginary unit; a sum's index is not free."""
    from sympy import Basic, I, MatrixBase

    if isinstance(parsed, (Basic, MatrixBase)):
        for symbol in parsed.free_symbols:
            if symbol.name == "i":
                return parsed.subs(symbol, I)
    return parsed
