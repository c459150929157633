"""Write in plain signs what only looks different: full-width forms, digits of other scripts; drop what is invisible."""

import re
import unicodedata

INVISIBLE = dict.fromkeys(
    map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u202a\u202b\u202c\u202d\u202e\ufeff"), ""
)
_TABLE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {0x3000: " "} | INVISIBLE
_DIGIT = re.compile(r"(?![0-9])\d")


def plain(text: str) -> str:
    """Return `text` with ASCII for full-width signs and decimal digits of any script, and nothing invisible.

    Example: `plain("－５\\u200b")` is "-5".
    """
    if text.isascii():
        return text
    return _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_TABLE))
