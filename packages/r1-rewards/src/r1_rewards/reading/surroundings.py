r"""Read what stands right beside a final answer and changes it: a sign, a power of ten, a percent sign, a denial."""

import re

NEAR = 60  # characters on either side that can change an answer

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


def in_context(extracted: str, before: str, behind: str) -> str:
    r"""Return `extracted` with what the text beside it makes of it: "not 5" in "it is not 5", -5 in `$-\boxed{5}$`."""
    before, behind = before[-NEAR:], behind[:NEAR]
    if _DENIED_BEFORE.search(before) or _DENIED_BEHIND.match(behind):
        return f"not {extracted}"
    if not extracted:
        return extracted
    whole = f"({extracted})" if _SUM.search(extracted) else extracted
    minus, more = _MINUS.search(before), _GOES_ON.match(behind)
    return ("-" if minus else "") + (whole if minus or more else extracted) + (more[0].strip() if more else "")
