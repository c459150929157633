"""Score a number with a tolerance, units and percent signs."""

import re
from collections import deque
from fractions import Fraction

from r1_rewards.reading import extract
from r1_rewards.reading.amounts import parse_exact
from r1_rewards.reading.hedges import hedge, in_context
from r1_rewards.reading.notation import SCALE
from r1_rewards.reading.number import parse_number, side_by_side
from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.reading.units import UNITS, Unit
from r1_rewards.types import Score

MAX_SHORT = 200  # characters
MAX_WORDS = 6  # of an answer that its words may take back; with more, it is a sentence about other things, too

_NUMBER_AND_REST = re.compile(
    r"(?P<number>[-+−]?[$€£¥]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?(?:/[0-9]+)?)\s*(?P<rest>.*)",
    re.DOTALL,
)
# Not the 2 of m^2, of x_2 or of 3 \times 10^2.
_START = re.compile(
    r"(?:(?<![\w)\]}])[-−])?[$€£]?(?<![\w.^{√])(?:\.[0-9]+|"
    r"[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+|\s?(?:\\times|\\cdot|×|\*|x)\s?10\s?\^\s?\{?[-+]?[0-9]*)?)"
)
_FRACTION_AND_REST = re.compile(r"[\s$]*(-?\\[dt]?frac\s?(?:\{-?[0-9]+\}|[0-9])\s?(?:\{[0-9]+\}|[0-9]))(.*)", re.DOTALL)
_SCALED = re.compile(rf"({'|'.join(SCALE)})s?\b", re.IGNORECASE)
# What makes the number in front of it another one: 2\pi, 5!, 3x, 2^5, 4 + 1, 7+k.
_FACTOR = re.compile(
    r"\\?(?:pi|sqrt|e)(?![A-Za-z])|\\(?:cdot|times|frac|ln|log|sin|cos|tan)(?![A-Za-z])|[!^√π²³]|[-+*/]\s?(?=[0-9(\\])"
    r"|\((?=[0-9])|[xyzn](?![A-Za-z])|[-+*±∓]\s?[a-z](?![A-Za-z])|\\(?:pm|mp)(?![A-Za-z])"
)
_TIMES_TEN = re.compile(r"\s?(?:\\times|\\cdot|×|\*|x)\s?10\s?\^?\s?\{?([-+]?[0-9]{1,3})\}?")
_SEVERAL = re.compile(r"^[-+]?[0-9.]+(?:,?\s+[-+]?[0-9.]+)+$|[0-9]\s*(?:\bor\b|±|\\pm\b|\\text\s?\{\s?or\b)\s*\W*[0-9]")
_BOUND = re.compile(r"\s*(?:[<>≤≥]|\\[lg]eq?(?![A-Za-z]))")
_OTHER_NUMBER = re.compile(r"(?<![0-9A-Za-z_^{.,/-])[0-9]")  # not the 2 of m^2 or s^{-2}
_MONEY = re.compile(r"\s*[-+−]?\s?\\?([$€£¥])\s?[0-9][^$]*$")
_CURRENCIES = {"$": "dollars", "€": "euros", "£": "pounds sterling", "¥": "yen"}
_DECORATION = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s?\{|\\[,;:! ()\[\]]|[${}~]|^\s*(?:\\approx|≈|about|=)")


def score(
    response: str,
    ground_truth: str,
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
    unit_required: bool = False,
) -> Score:
    r"""Return 1 if the response's number is within the tolerance of the ground truth, else 0.

    The tolerance is the larger of `relative` · |ground truth| and `absolute`, in the ground truth's unit; with 0,
    equality is exact (rational numbers). Units of length, mass, time, volume, area, speed, angle, energy and so on are
    converted ("150 cm" is "1.5 m"). An answer without a unit has the ground truth's, unless `unit_required`. "50%"
    equals "0.5" and "50", but "50" is not "0.5". The number is in the last `\boxed{…}`, `<answer>`, `####` or "Answer:
    x", or else the last one.

    Example: `score("about 9.8 m/s", "35.4 km/h", relative=0.01).value` is 1.0. Raises ValueError if the ground truth is
    not a number.
    """
    truth = read_quantity(ground_truth)
    if truth is None:
        raise ValueError(truth_problem(ground_truth))
    extracted, found = _final_answer(plain_characters(extract.after_thought(response)[-extract.TAIL :]))
    right = found is not None and _close(found, truth, relative, absolute, unit_required)
    reason = "within the tolerance" if right else "there is no one number" if found is None else "another number"
    return Score(float(right), {"overall": float(right), "accuracy": float(right)}, extracted=extracted, reason=reason)


def truth_problem(ground_truth: str) -> str | None:
    if read_quantity(ground_truth) is None:
        return f"the truth {ground_truth[:80]!r} is not a number with or without a unit"
    return None


def read_quantity(text: str) -> tuple[Fraction, str] | None:
    r"""Return a number and its unit as written ("" if none, "%" for percent), or None; reads "3\times 10^4 km"."""
    text = plain_characters(text[:1000])
    plain = _DECORATION.sub("", text).strip().rstrip(".").strip()
    if fraction := _FRACTION_AND_REST.match(text.strip()):
        number, rest = parse_exact(fraction[1]), _DECORATION.sub("", fraction[2]).strip().rstrip(".")
    elif match := _NUMBER_AND_REST.fullmatch(plain):
        number, rest = parse_number(match["number"]), match["rest"]
    else:
        return None
    if number is not None and (power := _TIMES_TEN.match(rest)):
        number, rest = number * Fraction(10) ** int(power[1]), rest[power.end() :].strip()
    if number is not None and (scale := _SCALED.match(rest)):
        number, rest = number * SCALE[scale[1].lower()], rest[scale.end() :].strip()
    if number is None or _FACTOR.match(rest) or (len(rest.split()) <= MAX_WORDS and _OTHER_NUMBER.search(rest)):
        return None
    money = _MONEY.match(text)
    return number, _CURRENCIES[money[1]] if money and not rest else _unit(rest)


def _final_answer(response: str) -> tuple[str | None, tuple[Fraction, str] | None]:
    for find in (extract.boxed, extract.tagged, extract.hashed, extract.stated):
        extracted = find(response)
        if extracted is not None:
            return extracted, _said(extracted)
    if len(response) <= MAX_SHORT and len(response.split()) <= MAX_WORDS:
        return response.strip(), _said(response.strip())
    last = extract.last_number(response)
    denied = last is not None and in_context(last, *response.rpartition(last)[::2]).startswith("not ")
    return last, None if denied else _last_quantity(response)


def _said(text: str) -> tuple[Fraction, str] | None:
    if len(text.split()) > MAX_WORDS:
        return read_quantity(text) or _last_quantity(text)
    if hedge(text, "", str.__eq__) or _SEVERAL.search(text) or _BOUND.match(text) or side_by_side(text):
        return None
    return read_quantity(text) or _last_quantity(text)


def _last_quantity(text: str) -> tuple[Fraction, str] | None:
    starts = deque((match.start() for match in _START.finditer(text[-extract.TAIL :])), maxlen=1)
    return read_quantity(text[-extract.TAIL :][starts[0] :][:200]) if starts else None


def _unit(words: str) -> str:
    plain = words.replace("\\", "").replace("per cent", "%").replace("percent", "%").strip()
    first = plain.split(None, 1)[0].rstrip(".,;:!?)") if plain else ""
    if first.startswith("%") or _unit_key(first) in UNITS:
        return "%" if first.startswith("%") else first
    return plain if len(plain.split()) <= 3 else ""


def _close(
    found: tuple[Fraction, str], truth: tuple[Fraction, str], relative: float, absolute: float, unit_required: bool
) -> bool:
    expected, expected_unit = truth
    tolerance = max(Fraction(relative) * abs(expected), Fraction(absolute))
    return any(
        abs(value - expected) <= tolerance for value in _values(*found, expected_unit, unit_required=unit_required)
    )


def _values(number: Fraction, unit: str, wanted: str, *, unit_required: bool) -> list[Fraction]:
    if unit == wanted:
        return [number]
    if "%" in (unit, wanted):
        if unit not in ("%", "") or wanted not in ("%", "") or unit_required:
            return []
        return [number, number / 100] if unit == "%" else [number, number * 100]
    known, target = UNITS.get(_unit_key(unit)), UNITS.get(_unit_key(wanted))
    if not unit:
        return [] if unit_required else [number]
    if known is None or target is None:  # "apples" and nothing: words that are no units do not count
        return [number] if not wanted or _unit_key(unit) == _unit_key(wanted) else []
    return [_convert(number, known, target)] if known.kind == target.kind else []


def _convert(number: Fraction, unit: Unit, target: Unit) -> Fraction:
    return number * unit.factor / target.factor


def _unit_key(unit: str) -> str:
    return unit.replace("^", "").replace("²", "2").replace("³", "3").replace("°", "degree").strip()
