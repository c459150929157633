"""The string comparison of the MATH data set (arXiv 2103.03874), which several trainers' verdicts use."""

import re

_WRAPPED_TEXT = re.compile(r"\\text\{(.+?)\}")
_FRACTION = re.compile(r"\d+|-\d+")


def is_equivalent(left: str, right: str) -> bool:
    try:
        return strip(left) == strip(right)
    except ValueError:
        return left == right


def strip_outer_text(written: str) -> str:
    written = written.strip()
    if len(written) < 10_000 and (wrapped := _WRAPPED_TEXT.fullmatch(written)):
        written = wrapped[1].strip()
    try:
        return strip(written)
    except ValueError:
        return written


def strip(written: str) -> str:
    r"""Drop blanks, units, degrees, dollar and percent signs; complete `\frac{}{}` and `\sqrt{}`.

    A short left side such as "x =" is dropped; "0.5" and "a/b" become fractions. Raises ValueError for two `\text{ `
    and for a `\sqrt` at the end.
    """
    text = written.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    text = _without_unit(text).replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text.startswith(".") else text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _full_fractions(_full_roots(text).replace(" ", ""))
    return _slash_as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _without_unit(text: str) -> str:
    parts = text.split("\\text{ ")
    if len(parts) > 2:
        raise ValueError("more than one unit")
    return parts[0]


def _full_roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    if any(not part for part in rest):
        raise ValueError("a root of nothing")
    return first + "".join("\\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _full_fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    written = [first]
    for part in rest:
        if part.startswith("{"):
            written.append("\\frac" + part)
        elif len(part) < 2:
            return text
        else:
            bottom = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            written.append(f"\\frac{{{part[0]}}}{bottom}")
    return "".join(written)


def _slash_as_fraction(text: str) -> str:
    sides = text.split("/")
    if len(sides) != 2 or not all(_FRACTION.fullmatch(side) and len(side) < 1000 for side in sides):
        return text
    numbers = [int(side) for side in sides]
    return f"\\frac{{{numbers[0]}}}{{{numbers[1]}}}" if text == f"{numbers[0]}/{numbers[1]}" else text
