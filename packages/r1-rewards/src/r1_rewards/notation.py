"""Rewrite the ways in which people write the same mathematics into the one that Math-Verify reads."""

import re
from fractions import Fraction

# Longest first; blanks keep a command apart from a following letter.
_REPLACED = {
    "\u200b": "", "\u200c": "", "\u200d": "", "\ufeff": "", "\u2060": "", "\u202a": "", "\u202c": "", "\u202e": "",
    "\xa0": " ", "\u202f": " ", "\u2009": " ",
    "−": "-", "–": "-", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ",
    "∞": r"\infty ", "π": r"\pi ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ", "≈": r"\approx ", "∈": r"\in ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "²": "^{2}", "³": "^{3}",
}  # fmt: skip
_CHARACTERS = str.maketrans(_REPLACED)
_WRAPPERS = ("$$", "$", r"\(", r"\)", r"\[", r"\]")
_ROOT = re.compile(r"√\s{0,4}(?:([0-9]+(?:\.[0-9]+)?|[A-Za-z])|(?=[({]))")
_POWER = re.compile(r"\s{0,4}\*\*\s{0,4}(-?[0-9]+|[A-Za-z])?")
_REPEATING = re.compile(r"(-?[0-9]*)\.([0-9]*)\\overline\s?\{([0-9]{1,30})\}")
_SCALE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)\s{{0,4}}({'|'.join(_SCALE)})s?\b", re.IGNORECASE)
_TEXT = r"\\(?:text|mbox|mathrm|textrm|operatorname)\s?\{\s{0,8}"
_UNITS = (
    "dollars?|cents?|euros?|pounds?|rupees?|km/h|kmph|mph|m/s|miles|mile|inches|inch|feet|foot|ft|yards?|meters?|metres?|"
    "centimeters?|kilometers?|km|cm|mm|m|kg|grams?|g|liters?|litres?|ml|hours?|minutes?|seconds?|days?|weeks?|months?|"
    "years?|degrees?|units?|square units|people|apples|percent"
)
_QUANTITY = re.compile(
    rf"(?P<number>-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)(?:\s{{1,4}}|(?=\\))(?:{_TEXT})?(?P<unit>{_UNITS})"
    r"(?P<power>\s?\^?\{?[23]\}?)?\s{0,8}\}?",
    re.IGNORECASE,
)
_WHOLLY_MBOX = re.compile(r"\\mbox\s?\{([^{}]*)\}")


def normalise(answer: str) -> str:
    r"""Return `answer` in LaTeX that Math-Verify reads, without math delimiters, invisible characters or final stop.

    Example: `normalise("$√2$.")` is `\sqrt{2}`; `normalise("5 million")` is `5000000`; `2**10` becomes `2^{10}`.
    """
    text = answer.translate(_CHARACTERS).strip().rstrip(".").strip()
    for opening in _WRAPPERS:
        text = text.removeprefix(opening).removesuffix(opening).strip()
    text = _WHOLLY_MBOX.sub(r"\1", text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1]}}}" if match[1] else r"\sqrt", text)
    text = _POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text)
    text = _REPEATING.sub(_repeating_fraction, text)
    return _SCALED.sub(_scaled_number, text).strip()


def quantity(text: str) -> tuple[str, str] | None:
    """Split "10 km/h" into ("10", "km/h"), or return None where `text` is not one number with a known unit.

    The unit comes in lower case, with its power and without a plural "s".
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    unit = match["unit"].lower()
    singular = unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit
    return match["number"], singular + re.sub(r"[^23]", "", match["power"] or "")


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, start, period = match.groups()
    sign = "-" if whole.startswith("-") else ""
    scale = 10 ** len(start[:30])
    value = Fraction(int(whole.lstrip("-")[:30] or 0)) + Fraction(int(start[:30] or 0), scale)
    value += Fraction(int(period), (10 ** len(period) - 1) * scale)
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scaled_number(match: re.Match[str]) -> str:
    number = Fraction(match[1].replace(",", "").replace("$", ""))
    value = number * _SCALE[match[2].lower()]
    return str(value) if value.denominator == 1 else match[0]
