r"""Rewrite solutions in a common form: `]2, 7]`, `\{x \mid x > 3\}`, "x < 1 or x > 2", "y = 3, x = 2"."""

import re

_OUTWARD = re.compile(r"([\[\]])\s?([^\[\](),]{1,80}),([^\[\](),]{1,80})([\[\]])")
_BUILDER = re.compile(r"\\\{\s?([A-Za-z])(?:\s?\\in\s?\\mathbb\s?\{?R\}?)?\s?(?:\\mid(?![A-Za-z])|:|\|)(.{1,200})\\\}")
_OR = re.compile(r"\\(?:text|mbox|mathrm)\s?\{\s?or\s?\}|\bor\b|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])")
_BOUND = re.compile(r"([A-Za-z])\s?(<|>|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])|\\leqslant|\\geqslant)\s?([^<>=]{1,60})")
_ASSIGNED = re.compile(r"([A-Za-z])\s?=\s?([^=,]{1,60})")
_SWAPPED = re.compile(r"([^=A-Za-z]{1,80})=\s?([A-Za-z])")
_RATIO = re.compile(r"([0-9]{1,9})\s(?:to|\\text\s?\{\s?to\s?\})\s([0-9]{1,9})")
_BRACKETED = re.compile(  # as a whole, with a comma: (0,1), x \in (0,1), \left\{0,1\right\}
    r"(?:[A-Za-z]\s?(?:=|\\in(?![A-Za-z]))\s?)?(?:\\left\s?)?(?:(\()[^()]{0,300},[^()]{0,300}\)|(\\\{)[^{}]{0,300},.{0,300}\\\})"
)
_SIGNS = re.compile(r"(\\pm|\\mp)(?![A-Za-z])")
_SEVERAL = re.compile(rf",|\band\b|{_SIGNS.pattern}|{_OR.pattern}")
_COLUMN = re.compile(r"(?:\\left\s?[(\[]\s?)?\\begin\{([pb]?matrix)\}([^&]{1,300})\\end\{\1\}(?:\s?\\right\s?[)\]])?")


def rewrite(text: str) -> str:
    if built := _BUILDER.fullmatch(text):
        text = built[2].strip()
    if (turned := _OUTWARD.fullmatch(text)) and text[0] + text[-1] != "[]":
        return "".join(("[" if turned[1] == "[" else "(", turned[2], ",", turned[3], "]" if turned[4] == "]" else ")"))
    if ratio := _RATIO.fullmatch(text):
        return f"{ratio[1]}:{ratio[2]}"
    if swapped := _SWAPPED.fullmatch(text):
        return f"{swapped[2]} = {swapped[1].strip()}"
    return _union(text) or _in_order(text) or text


def as_tuple(text: str) -> str:
    column = _COLUMN.fullmatch(text)
    return text if column is None else f"({','.join(part.strip() for part in column[2].split(chr(92) * 2))})"


def both_signs(text: str, other: str) -> str:
    r"""Return `\frac{1 \pm a}{2}` as a list of two if `other` has two values; any other text unchanged.

    Math-Verify reads a ± only outside braces.
    """
    if len(parts := _SIGNS.split(text)) != 3 or r"\{" in text or "," in text or not _SEVERAL.search(other):
        return text
    before, sign, behind = parts
    if before.count("{") <= before.count("}"):
        return text
    return ", ".join(f"{before}{one}{behind}" for one in ("+-" if sign == r"\pm" else "-+"))


def brackets(text: str) -> str:
    found = _BRACKETED.fullmatch(text)
    return (found[1] or found[2]).strip("\\") if found else ""


def _union(text: str) -> str | None:
    bounds = [_BOUND.fullmatch(part.strip()) for part in _OR.split(text)]
    if len(bounds) < 2 or None in bounds or len({bound[1] for bound in bounds if bound}) > 1:
        return None
    return r" \cup ".join(_interval(bound[2], bound[3].strip()) for bound in bounds if bound)


def _interval(sign: str, number: str) -> str:
    if sign.startswith(("<", r"\le")):
        return rf"(-\infty, {number}" + (")" if sign == "<" else "]")
    return ("(" if sign == ">" else "[") + rf"{number}, \infty)"


def _in_order(text: str) -> str | None:
    assigned = [_ASSIGNED.fullmatch(part.strip()) for part in text.split(",")]
    letters = [found[1] for found in assigned if found]
    if not 2 <= len(letters) == len(assigned) == len(set(letters)):
        return None
    return ", ".join(
        f"{found[1]}={found[2].strip()}" for found in sorted(filter(None, assigned), key=lambda one: one[1])
    )
