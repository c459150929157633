"""Detect answers that retract themselves or give several values, and signs or denials beside an answer.

Algebra systems drop words and read the last side of a chain: to them "5 is wrong" and "4 = 5" are 5.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from r1_rewards.reading.number import parse_number

NEAR = 60  # characters on either side that can change an answer

# Words that change what the number or name beside them says.
_CHANGING = {
    "no", "not", "isn", "isnt", "never", "wrong", "incorrect", "false", "untrue", "except", "excluding", "without",
    "neither", "nor", "either", "maybe", "perhaps", "possibly", "than", "least", "most", "between", "within", "beyond",
    "unless", "if", "but", "half", "twice", "thrice", "double", "triple", "squared", "cubed", "over", "below",
    "above", "under", "minus", "negative", "plus", "other", "another", "any", "anything", "something", "unknown",
    "undefined", "impossible", "guess",
}  # fmt: skip
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# Signs that are crossed out, invisible, or deny.
_DENYING = re.compile(
    r"\\(?:[hv]?phantom|[bx]?cancel|sout|st|not|lnot|neg|ne|neq|nequiv|ncong|nsim|notin|color\{white\})(?![A-Za-z])"
    r"|≠|¬|!=|\?|\bor(?:\s|\\text\s?\{\s?)(?:more|less|fewer|greater|higher|lower|above|below|so)\b|不|没|非|或"
    r"|[0-9]\s?(?:\\text\s?\{\s?)?choose\b"
)
_ELLIPSIS = re.compile(r"(?:,|;|\\cup|\+|(?<![0-9.])[0-9]{1,9})\s*(?:\\[lcd]?dots[bc]?|\.\.\.|…)")
_RELATION = re.compile(
    r"=|\\(?:equiv|sim|simeq|cong|to|rightarrow|Rightarrow|Longrightarrow|implies|iff|Leftrightarrow|leftrightarrow"
    r"|mapsto|lor|vee|parallel|propto)(?![A-Za-z])|≡|→|⇒|\\\\"
)
_ABOUT = re.compile(r"\\approx(?![A-Za-z])|≈")
_ROUNDING = Fraction(1, 20)  # relative; what is further away is another number, and no rounded one
_ARITHMETIC = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|left|right)(?![A-Za-z])")
_NUMERIC = re.compile(r"[-+*/^(){}\[\].,!\s0-9]*[0-9][-+*/^(){}\[\].,!\s0-9]*")
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:(?:any|every|some)(?:thing|\s(?:number|value))?\s(?:but|except(?:\sfor)?|other\sthan|besides)|other\sthan"
    r"|except(?:\sfor)?|excluding)"
    r"|\b(?:not|isn['’]?t|never|neither|nor)(?:\s(?:equal(?:\sto)?|simply|just|really|be))?"
    r"|\b(?:wrong|incorrect|false)(?:\s(?:answer|result|value|option|one))?\s?(?:is|was|would\sbe|:)"
    r"|\\(?:not\s?=|neq?(?![A-Za-z]))|≠|!=|不是|不等于|不为|并非)[\s$*:{}]*(?:\\[(\[])?\s*$",
    re.IGNORECASE,
)
_DENIED_BEHIND = re.compile(
    r"[\s$*}]*(?:\\[)\]])?[\s*,]*(?:(?:is|was|would\sbe)\s(?:wrong|incorrect|false|not\s(?:the|right|correct|true))\b"
    r"|isn['’]?t\s(?:the|right|correct|true)\b|\((?:wrong|incorrect|false)\)|是错|不对|不正确)",
    re.IGNORECASE,
)
_MINUS = re.compile(r"(?:[$=]|\\[(\[])\s*[-−]\s*$")  # not a hyphen that begins a line of a list
_GOES_ON = re.compile(
    r"\s?(?:(?:\\times|\\cdot|×)\s?10\s?\^\s?(?:\{\s?-?[0-9]{1,3}\s?\}|[0-9])|\\?%|\^\s?(?:\{[0-9]{1,3}\}|[0-9]))"
)
_SUM = re.compile(r"[^\s]\s?[-+=,]")


def hedge(extracted: str, truth: str, equal: Callable[[str, str], bool]) -> str | None:
    """Return why `extracted` is not one answer, or None; the ground truth's own words are allowed.

    `equal` compares the sides of a chain such as "2 + 2 = 4"; every numeric one must equal the ground truth.
    """
    known = set(map(str.lower, _WORD.findall(truth)))
    for word in map(str.lower, _WORD.findall(extracted)):
        if word in _CHANGING and word not in known:
            return f"it says {word!r}"
    for pattern in (_DENYING, _ELLIPSIS):
        found = pattern.search(extracted)
        if found and not pattern.search(truth):
            return f"it says {found[0]!r}"
    about = [number for side in _ABOUT.split(extracted) if (number := parse_number(side)) is not None]
    if any(abs(number - about[0]) > _ROUNDING * abs(about[0]) for number in about):
        return "it says two numbers that are not about the same"
    if _RELATION.search(truth):
        return None
    numeric = [side for side in map(str.strip, _RELATION.split(extracted)) if _is_numeric(side)]
    if len(numeric) > 1 and not all(equal(side, truth) for side in numeric):
        return f"it says {numeric[0]!r} and {numeric[-1]!r}"
    return None


def _is_numeric(side: str) -> bool:
    return bool(_NUMERIC.fullmatch(_ARITHMETIC.sub("", side)))


def in_context(extracted: str, before: str, behind: str) -> str:
    r"""Return `extracted` with its context applied: "not 5" in "it is not 5", -5 in `$-\boxed{5}$`."""
    before, behind = before[-NEAR:], behind[:NEAR]
    if _DENIED_BEFORE.search(before) or _DENIED_BEHIND.match(behind):
        return f"not {extracted}"
    if not extracted:
        return extracted
    whole = f"({extracted})" if _SUM.search(extracted) else extracted
    minus, more = _MINUS.search(before), _GOES_ON.match(behind)
    return ("-" if minus else "") + (whole if minus or more else extracted) + (more[0].strip() if more else "")
