"""Score a mathematical final answer by equality with the ground truth, however it is written.

Answers are compared as text, then as exact numbers, then by Math-Verify (extra `math`, imported at first use).
"""

import logging
import re
from collections.abc import Sequence
from fractions import Fraction

from r1_rewards.reading import extract
from r1_rewards.reading.amounts import close, equal_amounts
from r1_rewards.reading.guards import refusal
from r1_rewards.reading.hedges import hedge
from r1_rewards.reading.notation import as_shares, in_one_notation, normalise, with_bold_vectors, without_emphasis
from r1_rewards.reading.solutions import brackets
from r1_rewards.reading.truths import blank_problem, read_truths
from r1_rewards.types import Score

MISSING = "the math verifier needs Math-Verify: install it with `pip install 'r1-rewards[math]'`"

_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]{2,}")
_ARTICLE = re.compile(r"^(?:an?|the)\s+")
_PROSE_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_ZERO = 1e-20  # below it, a sum of larger numbers that cancel out cannot be told from zero
_MAX_PROSE_WORDS = 4  # more, and it is a sentence, in which Math-Verify would pick any number
_NUMERAL = re.compile(r"([0-9A-Za-z]{1,200})_\{?([0-9]{1,2})\}?")
_BLANKS = re.compile(r"(?<![0-9,])\s+|\s+(?![0-9])")
_CHOSEN = re.compile(  # "A. Paris", "(A)", "A", "Option A", r"\textbf{(A)} 5"
    r"(?i:option\s|choice\s)?(?:\\(?:textbf|text|mathrm|mathbf)\s?\{\s?)?\(?([A-J])(?:\)|[.:](?=\s|$)|\}|$)"
)
_PLAIN_OPTION = re.compile(r"\(?([A-J])\)?")
_OTHER_OPTION = re.compile(
    r"(?<![A-Za-z])\(?[A-J]\)|(?<![A-Za-z\\])[A-J][.:](?=\s|$)|(?:\b(?:or|and)\b|[,;/&])\s*\(?[A-J]\b"
)
_OPTION_BEFORE = re.compile(  # as AMC writes
    r"\\(?:textbf|text|mathbf|mathrm)\s?\{\s?\([A-J]\)[\s~]{0,8}\}(?:[\s~]|\\[ ,;:]){0,8}(?=\S)"
)
# A last factor that Math-Verify drops as a unit: the t of "v_0 + a t". Behind a number and \pi it is one.
_LAST_FACTOR = re.compile(
    r"(?P<before>(?<![A-Za-z\\])[A-Za-z]|\\(?!pi(?![a-z]))[a-z]{1,20}|_(?:[A-Za-z0-9]|\{[A-Za-z0-9]{1,9}\}))"
    r"\s(?P<last>[A-Za-z])$"
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
# What SymPy and Math-Verify raise for text that is no mathematics.
_UNREADABLE = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError)


def score(response: str, ground_truth: str | Sequence[str], *, digits: int = 6, strict: bool = True) -> Score:
    r"""Score a response by its final answer (see `extract.final_answer`).

    `accuracy`, the value, is 1 if the final answer equals the ground truth, or one of several (a list, or its JSON). A
    ground truth may itself be a solution with a box or a formula. `format` is 1 if a `\boxed{…}` follows the thought.
    For `digits` and `strict` see `equal`.

    Hostile responses (`9**9**9`, huge factorials, very long or deeply nested text) are wrong without being computed.
    Hard ones can take long: train with `load("math", …)`, whose workers have a deadline. Raises ImportError if
    Math-Verify is needed and missing, TypeError for a ground truth that is not text.

    Example: `score(r"so it is \boxed{\frac{2}{4}}.", "0.5").value` is 1.0.
    """
    truths = [_truth(truth) for truth in read_truths(ground_truth, blank=True)]
    extracted = extract.final_answer(response)
    right, reason = False, "there is no final answer"
    for truth in truths if extracted is not None else ():
        right, reason = compare(extracted or "", truth, digits=digits, strict=strict)
        if right:
            break
    accuracy, boxed = float(right), float(extract.boxed(extract.after_thought(response)) is not None)
    parts = {"overall": accuracy, "accuracy": accuracy, "format": boxed}
    return Score(accuracy, parts, extracted=extracted, reason=reason)


def truth_problem(ground_truth: str) -> str | None:
    if problem := blank_problem(ground_truth):
        return problem
    refused = [refusal(_truth(truth)) for truth in read_truths(ground_truth)]
    return f"the truth {ground_truth[:80]!r} is not computed: {refused[0]}" if all(refused) else None


def equal(extracted: str, truth: str, *, digits: int = 6, strict: bool = True) -> bool:
    r"""Whether a final answer and a ground truth mean the same.

    Decimal numbers may differ beyond `digits` decimals, counted from the first nonzero digit of a ground truth below
    0.1. `strict=False` allows other variable names, and sets as tuples. Not symmetric: "x = 5" is right for "5", and "x
    > 3" for "(3, \infty)".
    """
    return compare(extracted, truth, digits=digits, strict=strict)[0]


def compare(extracted: str, truth: str, *, digits: int = 6, strict: bool = True) -> tuple[bool, str]:
    if extracted.strip() == truth.strip() != "":
        return True, "the same text"
    extracted = without_emphasis(extracted)
    if reason := refusal(extracted):
        return False, f"not computed: {reason}"
    if reason := refusal(truth):
        return False, f"the truth is not computed: {reason}"
    extracted, truth = map(normalise, with_bold_vectors(extracted, truth))
    if not extracted or not truth:
        return False, "there is nothing to compare"
    if _packed(extracted) == _packed(truth):
        return True, "the same text"
    if (wanted := _PLAIN_OPTION.fullmatch(truth)) and (option := _CHOSEN.match(extracted)):
        same, several = option[1] == wanted[1], _OTHER_OPTION.search(extracted, option.end())
        return same and not several, "option by its letter" if same else "another option"
    extracted, truth = (_OPTION_BEFORE.sub("", side, count=1) for side in (extracted, truth))
    if reason := hedge(extracted, truth, lambda side, other: _compare_plain(side, other, digits, strict)[0]):
        return False, reason
    return _compare_plain(extracted, truth, digits, strict)


def _compare_plain(extracted: str, truth: str, digits: int, strict: bool) -> tuple[bool, str]:
    extracted, truth = in_one_notation(extracted, truth)
    if (decided := _equal_numerals(extracted, truth)) is not None:
        return decided, "by their bases"
    if (decided := equal_amounts(extracted, truth, digits)) is not None:
        return decided, "as numbers"
    if (decided := _equal_words(extracted, truth)) is not None:
        return decided, "as words"
    if strict and {brackets(extracted), brackets(truth)} == {"(", "{"}:
        return False, "a tuple or an interval is no set"
    # What normalising wrote out may be hostile where the original was not ("9²²²" becomes 9^{2}^{2}^{2}).
    if refusal(extracted) or refusal(truth):
        return False, "not computed"
    if extracted.lower() == truth.lower() and _LETTER.findall(extracted) != _LETTER.findall(truth):
        return False, "other letters"
    right = _equal_by_algebra(extracted, truth, digits, strict)
    if not right and (shares := as_shares(extracted, truth)):
        right = _equal_by_algebra(*shares, digits, strict)
    return right, "by algebra"


def _truth(ground_truth: str) -> str:
    found = extract.boxed_list(ground_truth) or extract.boxed(ground_truth)
    if found is None and "$" in ground_truth:
        found = extract.formulas(ground_truth)
    return ground_truth if found is None else found


def _packed(text: str) -> str:
    """Drop blanks, except before digits after a digit or comma: "32, 349" is a list, "32,349" a number."""
    return _BLANKS.sub("", text)


def _equal_numerals(extracted: str, truth: str) -> bool | None:
    left, right = _NUMERAL.fullmatch(extracted), _NUMERAL.fullmatch(truth)
    if left is None or right is None:
        return None
    try:
        return int(left[1], int(left[2])) == int(right[1], int(right[2]))
    except ValueError:
        return False


def _equal_words(extracted: str, truth: str) -> bool | None:
    """Compare words as text, so that "tac" is not the product c·a·t; None if neither is text."""
    if _WORDS.fullmatch(extracted) and _WORDS.fullmatch(truth):
        return _plain_words(extracted) == _plain_words(truth)
    if len(_PROSE_WORD.findall(extracted)) > _MAX_PROSE_WORDS:
        return False
    return None


def _plain_words(text: str) -> str:
    return _ARTICLE.sub("", " ".join(text.casefold().split()), count=1)


def _equal_by_algebra(extracted: str, truth: str, digits: int, strict: bool) -> bool:
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise ImportError(MISSING) from error
    # Its own time limits need SIGALRM, which only a main thread has; the pool's deadline takes their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Only LaTeX: Math-Verify hands what it takes for a plain expression to SymPy's parse_expr, which evaluates.
    # The whole box or nothing: without this it would take any fraction out of an unreadable answer.
    targets = [LatexExtractionConfig(try_extract_without_anchor=False)]
    try:
        gold, predicted = (
            [_with_imaginary_unit(item) for item in parse(rf"\boxed{{{text}}}", targets, parsing_timeout=None)]
            for text in (_LAST_FACTOR.sub(r"\g<before>{\g<last>}", side) for side in (truth, extracted))
        )
        settings = {"strict": strict, "allow_set_relation_comp": True, "timeout_seconds": None}
        return bool(verify(gold, predicted, digits, **settings)) and _same_size(gold, predicted, digits)
    except _UNREADABLE:
        return False


def _same_size(gold: list[object], predicted: list[object], digits: int) -> bool:
    from sympy import Abs, Expr, N

    if not (gold and predicted and isinstance(gold[0], Expr) and isinstance(predicted[0], Expr)):
        return True
    if not (gold[0].is_number and predicted[0].is_number):
        return True
    exact = predicted[0].doit(), gold[0].doit()
    if exact[0].is_Rational and exact[1].is_Rational:
        left, right = (Fraction(int(value.p), int(value.q)) for value in exact)
        return left == right or (right.denominator > 1 and close(left, right, digits))
    size, gap = (N(Abs(value), digits + 20) for value in (gold[0], gold[0] - predicted[0]))
    if not (size.is_Float or size.is_zero) or not (gap.is_Float or gap.is_zero) or size > 0.1:
        return True
    return bool(gap <= size * 10 ** (1 - digits) or (size < _ZERO and gap < _ZERO))


def _with_imaginary_unit(parsed: object) -> object:
    """Read a free variable i as the imaginary unit; a sum's index is not free."""
    from sympy import Basic, I, MatrixBase

    if isinstance(parsed, (Basic, MatrixBase)):
        for symbol in parsed.free_symbols:
            if symbol.name == "i":
                return parsed.subs(symbol, I)
    return parsed
