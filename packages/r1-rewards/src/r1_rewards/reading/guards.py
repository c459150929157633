"""Refuse text that would keep a computer algebra system busy for ever, by looking at their text only."""

import math
import re

MAX_CHARACTERS = 1_000
MAX_NESTING = 24
MAX_DIGITS = 200  # of one number
MAX_EXPONENT = 10_000
MAX_STACKED_EXPONENT = 100_000  # product of the exponents that stand on brackets
MAX_SYMBOLIC_EXPONENT = 50  # of a bracket with one variable, where expanding is the trouble
MAX_HARD_EXPONENT = 20  # of a bracket with several, and beside trigonometric functions
MAX_FACTORIAL = 1_000

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_SCIENTIFIC = re.compile(r"[0-9.][eE][+-]?[0-9]{4}")
_PRODUCT = re.compile(r"\*|\\cdot|\\times|[0-9]\s?[({]")
_EXPONENT = re.compile(r"(?:\^|\*\*)")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*-?[0-9!.\s]+[\s)}]*(?:\^|\*\*)")
_ON_BRACKET = re.compile(r"[)}\]]\s{0,8}(?:\^|\*\*)[\s{(]{0,8}-?([0-9]{1,6})")
_FACTORIAL = re.compile(r"([0-9]+)\s{0,8}!")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp)\b")
_TRIGONOMETRIC = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
_BIG_ARGUMENT = re.compile(r"\\(?:prod|sum|[dt]?binom)\b|(?<![A-Za-z\\])(?:prod|sum|binomial|factorial)\s?\(", re.I)


def refusal(text: str) -> str | None:
    """Return why `text` must not be parsed, or None if it may be.

    Bounded are: length, bracket nesting, the digits of one number, exponents and towers of exponents, factorials and
    factorials of factorials, and the numbers in sums, products and binomials. The test takes linear time and computes
    nothing.
    """
    if len(text) > MAX_CHARACTERS:
        return f"{len(text)} characters, more than {MAX_CHARACTERS}"
    if _nesting(text) > MAX_NESTING:
        return f"brackets nested deeper than {MAX_NESTING}"
    if _LONG_NUMBER.search(text) or _SCIENTIFIC.search(text):
        return f"a number of more than {MAX_DIGITS} digits"
    return _power_refusal(text) or _factorial_refusal(text)


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _power_refusal(text: str) -> str | None:
    if _TOWER.search(text):
        return "an exponent with an exponent"
    for match in _EXPONENT.finditer(text):
        exponent = _group_at(text, match.end())
        digits = [int(number) for number in re.findall(r"[0-9]+", exponent)]
        product = math.prod(digits) if _PRODUCT.search(exponent) else 0
        if any(number > MAX_EXPONENT for number in (*digits, product)) or ("!" in exponent and digits):
            return f"an exponent above {MAX_EXPONENT}"
        allowed = MAX_HARD_EXPONENT if _TRIGONOMETRIC.search(text) else MAX_SYMBOLIC_EXPONENT
        if any(number > allowed for number in digits) and _FUNCTION.search(text):
            return f"a function with a power above {allowed}"
    variables = {character for character in _COMMAND.sub("", text) if character.isalpha()}
    allowed = MAX_SYMBOLIC_EXPONENT if len(variables) == 1 else MAX_HARD_EXPONENT
    stacked = 1
    for exponent in _ON_BRACKET.findall(text):
        stacked *= max(int(exponent), 1)
        if variables and int(exponent) > allowed:
            return f"a bracket to a power above {allowed}"
        if stacked > MAX_STACKED_EXPONENT:
            return "exponents on brackets multiply to a huge one"
    if _BIG_ARGUMENT.search(text) and any(len(number) > 4 for number in re.findall(r"[0-9]+", text)):
        return "a sum, product or binomial of large numbers"
    return None


def _factorial_refusal(text: str) -> str | None:
    marks = text.count("!")
    if any(len(number) > 4 or int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)):
        return f"a factorial of more than {MAX_FACTORIAL}"
    of_bracket = re.search(r"[)}\]]\s{0,8}!", text) is not None
    if marks > 8 or re.search(r"!\s{0,8}!", text) or (of_bracket and (marks > 1 or "^" in text or "**" in text)):
        return "a factorial of a huge number"
    if of_bracket and any(int(number) > MAX_FACTORIAL for number in re.findall(r"[0-9]{1,5}", text)):
        return f"a factorial of more than {MAX_FACTORIAL}"
    return None


def _group_at(text: str, start: int) -> str:
    """Return the bracketed group or the run of digits and letters that begins at `start`."""
    start += len(text) - start - len(text[start:].lstrip())
    if text[start : start + 1] not in ("{", "("):
        return re.match(r"[-+]?[\w.!]*", text[start:]).group()  # type: ignore[union-attr]
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "{(") - (text[position] in "})")
        if depth == 0:
            return text[start : position + 1]
    return text[start:]
