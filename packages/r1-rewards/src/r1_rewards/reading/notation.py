"""Rewrite the many notations of mathematics in the one that Math-Verify reads."""

import re
import unicodedata
from fractions import Fraction
from itertools import pairwise

from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.reading.solutions import as_tuple, both_signs, rewrite
from r1_rewards.reading.units import UNITS, Unit

# Longest first; blanks keep a command apart from a following letter.
_REPLACED = {
    "\xa0": " ", "\u202f": " ", "\u2009": " ", "。": ".", "≈": "", "⁄": "/", "∶": ":", "…": "...",
    "−": "-", "–": "-", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ",
    "∞": r"\infty ", "π": r"\pi ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ", "∈": r"\in ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
}  # fmt: skip
_CHARACTERS = str.maketrans(_REPLACED)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
_SUPERSCRIPT = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+|[₀₁₂₃₄₅₆₇₈₉]+")
_FINAL_STOP = re.compile(r"(?<!\.)\.$")
_WRAPPERS = ("$$", "$", r"\(", r"\)", r"\[", r"\]", "`", '"')
_ABOUT = re.compile(r"^(?:\\approx|\\sim(?![A-Za-z])|~|(?:approximately|about|roughly)\s)\s*")
_SIZE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm)(?![A-Za-z])\s?"
)
_STYLED = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|underline|mathit)(?![A-Za-z])\s?(?:\{\s?(-?[0-9.]{1,40}|[A-Za-z])\s?\}|([A-Za-z])(?![A-Za-z]))"
)
_BOLD_LETTER = re.compile(r"\\(?:mathbf|boldsymbol|bm)(?![A-Za-z])\s?\{?\s?[A-Za-z]\s?(?:\}|(?![A-Za-z]))")
_ARROW = re.compile(
    r"\\(?:vec|overrightarrow)(?![A-Za-z])\s?(?:\{\s?([A-Za-z])\s?\}|([A-Za-z])(?![A-Za-z]))"
    r"|\\(?:wide)?hat(?![A-Za-z])\s?\{?\s?(?:\\([ij])math(?![A-Za-z])|([ijk])(?![A-Za-z]))\s?\}?"
)
_DOLLARS = re.compile(r"-?\$[0-9][^$]*$")
_COLOR = re.compile(r"\\(?:text)?color\s?\{[a-z]{1,20}\}")
_SAID = re.compile(
    r"^(?:\\text\s?\{\s{0,4})?(?:(?:so|thus|hence|therefore),?\s)?(?:the\s)?(?:final\s|correct\s)?"
    r"(?:answer(?:\sis|:)|(?:最终)?答案(?:[是为]|:))\s{0,4}:?"
    r"\s{0,4}\}?\s{0,4}",
    re.IGNORECASE,
)
_NUMBER_TIMES = re.compile(r"(?<![0-9.(])([0-9]+(?:\.[0-9]+)?)\s?\((-?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?)\)")
_CURRENCY = re.compile(r"^(?:USD|EUR|INR|Rs\.?)\s{0,4}(?=[0-9])")
_WHOLLY_TEXT = re.compile(r"\\(?:mbox|text)\s?\{([^{}]*)\}")
_ROOT = re.compile(r"√\s{0,4}(?:([0-9]+(?:\.[0-9]+)?|[A-Za-z])|\(([^()]*)\)|(?=\{))")
_BARE_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s?(?=\{)")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_POWER = re.compile(r"\s{0,4}\*\*\s{0,4}(-?[0-9]+|[A-Za-z])?")
_REPEATING = re.compile(r"(-?[0-9]*)\.([0-9]*)\\(?:overline|dot)\s?\{([0-9]{1,30})\}")
_PERIOD = re.compile(r"(-?[0-9]*)\.([0-9]*)\(([0-9]{1,30})\)")  # as a whole: 0.5(3) within a formula is a product
_GOES_ON = re.compile(r"(-?[0-9]*)\.([0-9]{0,30}?)([0-9]{1,12}?)\3{2,30}\s?(?:\.\.\.|\\[lcd]?dots)")
_MIXED = re.compile(r"(-?)([0-9]{1,9})(?:\s|~|\\[ ,;:])+([0-9]{1,9})/([0-9]{1,9})")
_GROUPED_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:(?:[ _']|\\[ ,;:!])[0-9]{3})+(?:\.[0-9]+)?")
_TIMES_TEN = re.compile(r"(?<=[0-9])\s{0,4}[xX*]\s{0,4}(?=10\s?\^)")
_EXPONENT_MARK = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})")
_DEGREES = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc))\s?[({]?\s?([0-9]+(?:\.[0-9]+)?)\s?\^\s?\{?\s?\\circ\s?\}?[)}]?")
_MATRIX = re.compile(r"\[\s?\[[^\[\]]+\](?:\s?,\s?\[[^\[\]]+\])*\s?\]")
_MONEY = re.compile(r"(-?)\\?([$€£¥])\s?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_CURRENCIES = {"€": "euro", "£": "pound sterling", "¥": "yen"}
SCALE = {"hundred": 100, "dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_SCALED = re.compile(
    rf"(-?(?:\\?\$)?[0-9][0-9,]*(?:\.[0-9]+)?)\s{{0,4}}(?:\\text\s?\{{\s{{0,4}}({'|'.join(SCALE)})s?\s{{0,4}}\}}"
    rf"|({'|'.join(SCALE)})s?\b)",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"(?<=[0-9}])\s{0,4}(?:\\text\s?\{\s{0,4}per\s?cent\s{0,4}\}|per\s?cent\b)")
_KILO = re.compile(r"(-?(?:\\?\$)?[0-9][0-9,]*(?:\.[0-9]+)?)\s?k")
_PLAIN_NUMBER = re.compile(r"-?(?:\\?\$)?[0-9][0-9,]*(?:\.[0-9]+)?")
_COUNTER = re.compile(r"(?<=[0-9])\s?(?:个|元|人|名|只|条|张|本|块|岁|次|种|天|年)$")
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) )?(?:no (?:real )?(?:solutions?|roots?)|(?:the )?empty set)", re.IGNORECASE
)
_PER_DEGREE = r"\\cdot\\frac{\\pi}{180}"
_DEGREE = re.compile(r"\s?\^\s?(?:\\circ|\{\s?\\circ\s?\})|\sdegrees?$|\s?\\text\s?\{\s?degrees?\s?\}$")
_RADIANS = re.compile(r"\s?(?:\\(?:text|mathrm)\s?\{\s?)?\brad(?:ians?)?\b(?:\s?\})?$")
_RADIAN = re.compile(rf"\\pi(?![A-Za-z])|{_RADIANS.pattern}")
_TEXT = r"\\(?:text|mbox|mathrm|textrm|operatorname)\s?\{\s{0,8}"
_COUNTED = (
    "dollars?", "cents?", "euros?", "rupees?", "units?", r"square\sunits", "people", "apples?", "percent", "months?",
    "years?",
)  # fmt: skip
_UNITS = "|".join(sorted((*map(re.escape, UNITS), *_COUNTED), key=len, reverse=True))
_QUANTITY = re.compile(
    rf"(?P<number>-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)(?:\\[ ,]|[ ~]){{0,4}}(?:{_TEXT})?(?P<unit>{_UNITS})"
    r"\s{0,8}\}?\s?(?P<power>\^?\{?[23]\}?)?\s{0,8}\}?",
    re.IGNORECASE,
)
_PART = re.compile(
    rf"([0-9][0-9,]*(?:\.[0-9]+)?)(?:\\[ ,]|[ ~]){{0,4}}(?:{_TEXT})?({'|'.join(sorted(UNITS, key=len, reverse=True))})"
    r"(?![A-Za-z0-9^])(?:[\s,~}]|\\[ ,;]|\\text\s?\{\s?and\b|\band\b){0,12}"
)
_LAST_WORDS = re.compile(
    rf"(?P<rest>.*[0-9a-z)}}\]])(?:\\[ ,;]|[ ~])*"
    rf"(?:{_TEXT}(?P<words>[A-Za-z][A-Za-z /]*)\}}|(?<=[ ~,])(?P<unit>{_UNITS}))"
    r"\s?(?P<power>\^?\{?[23]\}?)?"
)


def normalise(written: str) -> str:
    r"""Return `written` as LaTeX for Math-Verify, without delimiters and final stop.

    Example: `normalise("5 million")` is `5000000`.
    """
    text = _FINAL_STOP.sub("", _plain_characters(written).strip()).strip()
    for opening in _WRAPPERS:
        if opening != "$" or not _DOLLARS.match(text):  # "$5" is money, "$5$" a formula
            text = text.removeprefix(opening).removesuffix(opening).strip()
    text = _STYLED.sub(r"\1\2", _SIZE.sub("", _SAID.sub("", _COLOR.sub("", text)))).strip()
    text = _CURRENCY.sub("", _ABOUT.sub("", text))
    text = _WHOLLY_TEXT.sub(r"\1", text) if _WHOLLY_TEXT.fullmatch(text) else text
    text = r"\emptyset" if _NO_SOLUTION.fullmatch(text) else _COUNTER.sub("", _PERCENT.sub(r"\\%", text))
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}" if match[1] or match[2] else r"\sqrt", text)
    text = _BARE_ROOT.sub(r"\\sqrt", text.replace(r"\varnothing", r"\emptyset"))
    text = _POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text)
    text = _DEGREES.sub(r"\1(\\frac{\2\\pi}{180})", text)
    text = _REPEATING.sub(_repeating_fraction, text)
    text = _TIMES_TEN.sub(r"\\times ", text.replace(r"\langle", "(").replace(r"\rangle", ")"))
    text = _NUMBER_TIMES.sub(r"\1 \\cdot (\2)", _whole_number_or_matrix(text) or text)
    return rewrite(_SCALED.sub(_scaled_number, text).strip())


def in_one_notation(left: str, right: str) -> tuple[str, str]:
    """Write an answer (`left`) and its ground truth (`right`) in the same notation.

    A ground truth's own k may be a variable, so 70k is 70000 only for a numeric one.
    """
    if _DEGREE.search(left) and _RADIAN.search(right) and not _DEGREE.search(right):
        left, right = _DEGREE.sub(_PER_DEGREE, left), _RADIANS.sub("", right)
    elif _DEGREE.search(right) and _RADIAN.search(left) and not _DEGREE.search(left):
        left, right = _RADIANS.sub("", left), _DEGREE.sub(_PER_DEGREE, right)
    if left.startswith("(") != right.startswith("("):
        left, right = as_tuple(left), as_tuple(right)
    if (thousands := _KILO.fullmatch(left)) and _PLAIN_NUMBER.fullmatch(right):
        left = _SCALED.sub(_scaled_number, f"{thousands[1]} thousand")
    return both_signs(left, right), both_signs(right, left)


def with_bold_vectors(left: str, right: str) -> tuple[str, str]:
    if (_ARROW.search(left) and _BOLD_LETTER.search(right)) or (_ARROW.search(right) and _BOLD_LETTER.search(left)):
        left, right = (_ARROW.sub(_bold_letter, side) for side in (left, right))
    return left, right


def _bold_letter(arrow: re.Match[str]) -> str:
    return rf"\mathbf{{{next(filter(None, arrow.groups()))}}}"


def as_shares(left: str, right: str) -> tuple[str, str] | None:
    if left.endswith("%") == right.endswith("%"):
        return None
    return _share(left), _share(right)


def _share(text: str) -> str:
    return rf"\frac{{{text.rstrip('%').rstrip(chr(92))}}}{{100}}" if text.endswith("%") else text


def without_emphasis(written: str) -> str:
    match = _BOLD.fullmatch(written.strip())
    return match[1] if match else written


def quantity(text: str) -> tuple[str, Unit | str] | None:
    """Split "10 km/h" into number and unit, or return None if `text` is not one number with a known unit.

    Units that cannot be converted, such as apples, are lower-case words without a plural "s".
    """
    if money := _MONEY.fullmatch(text):
        return money[1] + money[3], UNITS["dollar"] if money[2] == "$" else _CURRENCIES[money[2]]
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    name = match["unit"] + re.sub(r"[^23]", "", match["power"] or "")
    unit = UNITS.get(name) or UNITS.get(name.lower())
    return match["number"], unit or name.lower().removesuffix("s")


def parts_of_amount(text: str) -> list[tuple[Fraction, Unit]]:
    matches, place = [], 0
    while match := _PART.match(text, place):
        matches.append(match)
        place = match.end()
    parts = [(Fraction(match[1].replace(",", "")), UNITS[match[2]]) for match in matches]
    falling = all(
        one.kind == next_one.kind and one.factor > next_one.factor for (_, one), (_, next_one) in pairwise(parts)
    )
    return parts if falling and place == len(text) else []


def split_words(text: str) -> tuple[str, Unit | str] | None:
    r"""Split r"\frac12 \text{ cm}" into the text before the last words and these, as a unit if possible; or None."""
    match = _LAST_WORDS.fullmatch(text)
    if match is None:
        return None
    words = " ".join((match["words"] or match["unit"]).split()) + re.sub(r"[^23]", "", match["power"] or "")
    unit = UNITS.get(words) or UNITS.get(words.lower())
    return match["rest"], unit or words.lower().removesuffix("s")


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(_raised_or_lowered, plain_characters(text)).translate(_CHARACTERS)
    return "".join(character if character.isascii() else _plain_number(character) for character in text)


def _raised_or_lowered(match: re.Match[str]) -> str:
    return ("_{" if match[0][0] in "₀₁₂₃₄₅₆₇₈₉" else "^{") + match[0].translate(_SUPERSCRIPTS) + "}"


def _plain_number(character: str) -> str:
    if unicodedata.category(character) != "No":
        return character
    value = Fraction(unicodedata.numeric(character)).limit_denominator(1000)
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _whole_number_or_matrix(text: str) -> str | None:
    if text.lower() in _NUMBER_WORDS:
        return str(_NUMBER_WORDS.index(text.lower()))
    if match := _PERIOD.fullmatch(text) or _GOES_ON.fullmatch(text):
        return _repeating_fraction(match)
    if _GROUPED_THOUSANDS.fullmatch(text):
        return re.sub(r"[^-.0-9]", "", text)
    if match := _EXPONENT_MARK.fullmatch(text):
        return rf"{match[1]}\times 10^{{{int(match[2])}}}"
    if match := _MIXED.fullmatch(text):
        sign, whole, numerator, denominator = match[1], *map(int, match.groups()[1:])
        return rf"{sign}\frac{{{whole * denominator + numerator}}}{{{denominator}}}"
    if _MATRIX.fullmatch(text):
        rows = [row.strip(" [],").replace(",", "&") for row in text[1:-1].split("]")]
        return r"\begin{pmatrix}" + r"\\".join(row for row in rows if row) + r"\end{pmatrix}"
    return None


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, start, period = match.groups()
    sign = "-" if whole.startswith("-") else ""
    scale = 10 ** len(start[:30])
    value = Fraction(int(whole.lstrip("-")[:30] or 0)) + Fraction(int(start[:30] or 0), scale)
    value += Fraction(int(period), (10 ** len(period) - 1) * scale)
    return rf"{sign}\frac{{{value.numerator}}}{{{value.denominator}}}"


def _scaled_number(match: re.Match[str]) -> str:
    number = Fraction(match[1].replace(",", "").replace("\\", "").replace("$", ""))
    value = number * SCALE[(match[2] or match[3]).lower()]
    return str(value) if value.denominator == 1 else match[0]
