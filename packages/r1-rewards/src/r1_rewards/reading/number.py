"""Parse a written number exactly, without computing huge ones."""

import re
from fractions import Fraction

MAX_DIGITS = 400  # also bounds a decimal exponent

_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.(?P<decimals>[0-9]*))?"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3}))?(?:/(?P<denominator>[0-9]+))?"
)
_SPACED_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:[ \xa0][0-9]{3})+(?![0-9,])")
_SIDE_BY_SIDE = re.compile(r"[0-9]\.?[$€£¥%{}\\\s]+\.?[0-9]")
_OF_NO_NUMBER = re.compile(r"[^-−+0-9.,/eE$€£¥%{}\\\s]")
_DROPPED = str.maketrans(dict.fromkeys("$€£¥%{}\\ \t\r\n\xa0\u200b\ufeff") | {"−": "-"})


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a plain number, or None for anything else.

    It may have a sign, proper thousands commas or blanks, decimals, an exponent of up to three digits, and one
    denominator; currency signs, `%`, braces and a final full stop are ignored.
    """
    if len(text) > MAX_DIGITS or side_by_side(text):
        return None
    plain = text.translate(_DROPPED).rstrip(".")
    match = _NUMBER.fullmatch(plain)
    if match is None:
        return None
    whole, decimals = match["whole"].replace(",", ""), match["decimals"] or ""
    if not whole and not decimals:
        return None
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > MAX_DIGITS:
        return None
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) * Fraction(10) ** exponent / denominator
    return -value if match["sign"] == "-" else value


def side_by_side(text: str) -> bool:
    """Whether `text` is several numbers separated only by what `parse_number` ignores: "7 8"."""
    return not _OF_NO_NUMBER.search(text) and bool(_SIDE_BY_SIDE.search(_SPACED_THOUSANDS.sub("1", text)))
