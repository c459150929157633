"""Compare two numbers with or without units, exactly or after rounding."""

import math
import re
from fractions import Fraction

from r1_rewards.reading.notation import parts_of_amount, quantity, split_words
from r1_rewards.reading.number import parse_number, side_by_side
from r1_rewards.reading.units import Unit

_SCIENTIFIC = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)\s?(?:\\times|\\cdot)\s?10\s?\^\s?\{?(-?[0-9]{1,3})\}?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s?(?:\{(-?[0-9]{1,200})\}|([0-9]))\s?(?:\{([0-9]{1,200})\}|([0-9]))")
_SPACED_COMMA = re.compile(r",\s")  # a list, where "32,349" is a number
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,(?:[0-9]{2}|[0-9]{4,})")
_DECIMAL_POINT = re.compile(r"-?[0-9]+\.[0-9]+")
_IMPROPER_COMMAS = re.compile(r"[0-9]+(?:,[0-9]+)+")
_PROPER_COMMAS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")


def equal_amounts(extracted: str, truth: str, digits: int) -> bool | None:
    """Whether two numbers with or without units are equal; None if this cannot decide.

    Units are converted, and "10 hours 30 minutes" summed. "25%" is both 25 and 0.25, unless the other has a unit.
    """
    if (decided := _equal_sums(extracted, truth)) is not None:
        return decided
    extracted_number, extracted_unit = quantity(extracted) or (extracted, "")
    truth_number, truth_unit = quantity(truth) or (truth, "")
    if _SPACED_COMMA.search(extracted_number) or _SPACED_COMMA.search(truth_number):
        return None
    left, right = _number(extracted_number, truth_number), _number(truth_number, extracted_number)
    if left is None or right is None:
        miswritten = _miswritten_number(extracted_number if left is None else truth_number)
        return False if miswritten and (left is None) != (right is None) else _different_units(extracted, truth)
    if isinstance(extracted_unit, Unit) and isinstance(truth_unit, Unit) and extracted_unit != truth_unit:
        return extracted_unit.kind == truth_unit.kind and left * extracted_unit.factor == right * truth_unit.factor
    percents = "%" in extracted_number, "%" in truth_number
    if (extracted_unit and truth_unit and extracted_unit != truth_unit) or (
        (percents[0] and truth_unit) or (percents[1] and extracted_unit)
    ):
        return False
    if percents[0] == percents[1]:
        return close(left, right, digits)
    return close(left, right, digits) or close(*((left / 100, right) if percents[0] else (left, right / 100)), digits)


def _equal_sums(extracted: str, truth: str) -> bool | None:
    """Compare amounts in several units, as "10 hours 30 minutes"; None if neither is one.

    A number without a unit may have any unit of the other.
    """
    left, right = parts_of_amount(extracted), parts_of_amount(truth)
    if len(left) < 2 and len(right) < 2:
        return None
    if left and right:
        return left[0][1].kind == right[0][1].kind and _sum(left) == _sum(right)
    number = _number(truth if left else extracted, "")
    return None if number is None else any(_sum(left or right) == number * unit.factor for _, unit in left or right)


def _sum(parts: list[tuple[Fraction, Unit]]) -> Fraction:
    return sum((number * unit.factor for number, unit in parts), Fraction(0))


def close(left: Fraction, right: Fraction, digits: int) -> bool:
    """Whether two numbers are equal, or round to the same `digits` decimals if `right` is not whole.

    Below 0.1, decimals are counted from about `right`'s first digit.
    """
    if left == right:
        return True
    if right.denominator == 1:
        return False
    zeros = max(0, int((right.denominator.bit_length() - right.numerator.bit_length()) * math.log10(2)))
    scale = 10**zeros
    return round(left * scale, digits) == round(right * scale, digits)


def _different_units(extracted: str, truth: str) -> bool | None:
    left, right = split_words(extracted), split_words(truth)
    if left is None or right is None or left[1] == right[1]:
        return None
    if not (isinstance(left[1], Unit) and isinstance(right[1], Unit)):
        return False
    numbers = _number(left[0], right[0]), _number(right[0], left[0])
    if left[1].kind != right[1].kind or numbers[0] is None or numbers[1] is None:
        return False
    return numbers[0] * left[1].factor == numbers[1] * right[1].factor


def parse_exact(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text.strip())
    if match is None:
        return parse_number(text)
    top, bottom = int(match[2] or match[3]), int(match[4] or match[5])
    return None if bottom == 0 else Fraction(-top if match[1] else top, bottom)


def _number(text: str, other: str) -> Fraction | None:
    if _SCIENTIFIC.fullmatch(text):
        text = _SCIENTIFIC.sub(r"\1e\2", text)
    elif _DECIMAL_COMMA.fullmatch(text) and (_DECIMAL_POINT.fullmatch(other) or _DECIMAL_COMMA.fullmatch(other)):
        text = text.replace(",", ".")
    return parse_exact(text)


def _miswritten_number(text: str) -> bool:
    improper = _IMPROPER_COMMAS.fullmatch(text) and not _PROPER_COMMAS.fullmatch(text)
    return bool(improper) or side_by_side(text)
