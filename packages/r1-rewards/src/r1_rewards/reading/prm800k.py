"""PRM800K's grader (arXiv 2305.20050) as in MathRuler: normalised strings, then SymPy's simplify.

EasyR1's and veRL's published verdicts use it. Text that the original evaluates is parsed by `expression`; what would be
computed for ever is unequal.
"""

import contextlib
import math
import re

from r1_rewards.reading import hendrycks
from r1_rewards.reading.expression import Unreadable, parse
from r1_rewards.reading.guards import refusal
from r1_rewards.reading.plain_text import latex_to_text

MAX_CHARACTERS = 10_000

_WRAPPED_TEXT = re.compile(r"\\text\{(.+?)\}")
_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_UNIT = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNITS]
_LITERS = re.compile(r"liter(?:es)?s? *(?:\^[0-9]+)?")
_DEGREES = re.compile(r"\^ *\\circ")
_MIXED = re.compile(r"([0-9]) +([0-9])")
_COMMAS = re.compile(r"([0-9]),([0-9]{3})(?=$|[^0-9])")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_FLOAT = re.compile(r"\s*[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?[0-9]{1,3})?\s*")
_SAME_DIGITS = 1e-7
_FORBIDDEN = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")


def grade(extracted: str, truth: str, *, compact: bool = True) -> bool:
    if max(len(extracted), len(truth)) > MAX_CHARACTERS:
        return extracted.strip() == truth.strip()
    if hendrycks.strip_outer_text(extracted) == hendrycks.strip_outer_text(truth):
        return True
    extracted, truth = normalise(extracted, compact=compact), normalise(truth, compact=compact)
    if extracted == truth:
        return True
    if not extracted:
        return False
    parts, truths = _elements(extracted), _elements(truth)
    if len(truths) > 1 and (truth[0] != extracted[0] or truth[-1] != extracted[-1]):
        return False
    return len(truths) == len(parts) and all(map(_same_element, parts, truths))


def normalise(extracted: str, *, compact: bool = True) -> str:
    """Return `extracted` as lower-case plain text without units, currency and percent signs.

    MathRuler also drops blanks and braces (`compact`); PRIME does not, but drops liters.
    """
    wrapped = _WRAPPED_TEXT.fullmatch(extracted)
    text = wrapped[1] if wrapped else extracted
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in _UNIT if compact else [*_UNIT, _LITERS]:
        text = unit.sub("", text)
    text = _DEGREES.sub("", text)
    if len(text) > 1 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (whole := _whole(text)) is not None:
        text = str(whole)
    if "\\" in text:
        with contextlib.suppress(ValueError):
            text = latex_to_text(text)
    text = _MIXED.sub(r"\1+\2", re.sub("- *", "-", text)).lower()
    if compact:
        text = text.replace(" ", "").replace("{", "").replace("}", "")
    whole = _whole(_plain_commas(text))
    return text if whole is None else str(whole)


def _same_element(extracted: str, truth: str) -> bool:
    if _FRACTION.fullmatch(truth) and _FRACTION.fullmatch(extracted):
        return truth == extracted
    if (_whole(_plain_commas(truth)) is None) != (_whole(_plain_commas(extracted)) is None):
        return False
    return _equal_by_algebra(extracted, truth)


def _equal_by_algebra(extracted: str, truth: str) -> bool:
    difference = f"({truth})-({extracted})"
    letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
    if len(letters) > 2 or _FORBIDDEN.search(difference) or refusal(extracted) or refusal(truth):
        return False
    from sympy import SympifyError, simplify

    try:
        return bool(simplify(parse(truth) - parse(extracted)) == 0)
    except (Unreadable, SympifyError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError):
        return False


def _elements(text: str) -> list[str]:
    text = _plain_commas(text)
    inside = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inside) & set("()[]"):
        return [element.strip() for element in inside.split(",")]
    return [text] if text else []


def _whole(text: str) -> int | None:
    value = float(text) if _FLOAT.fullmatch(text) else math.inf
    return round(value) if math.isfinite(value) and abs(value - round(value)) <= _SAME_DIGITS else None


def _plain_commas(text: str) -> str:
    while (shorter := _COMMAS.sub(r"\1\2", text)) != text:
        text = shorter
        if text.count(",") > 50:
            return text
    return text
