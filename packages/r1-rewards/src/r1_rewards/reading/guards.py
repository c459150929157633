"""Reject text that would keep a computer algebra system busy for ever, by the text alone."""

import math
import re

MAX_CHARACTERS = 1_000
MAX_NESTING = 24
MAX_DIGITS = 200  # of one number
MAX_EXPONENT = 10_000
MAX_NESTED_EXPONENT = 3  # of what is no plain number, within an exponent
MAX_STACKED_EXPONENT = 100_000  # product of the exponents that stand on brackets
MAX_SYMBOLIC_EXPONENT = 50  # of a bracket with one variable, where expanding is the trouble
MAX_HARD_EXPONENT = 20  # of a bracket with several, and beside trigonometric functions
MAX_MATRIX_EXPONENT = 4  # of a matrix or determinant with variables
MAX_INTEGRATED = 6  # exponent in an integral
MAX_ROOT_EXPONENT = 1_000  # of a bracket with a root, which is multiplied out
MAX_FACTORIAL = 1_000

_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")
_SCIENTIFIC = re.compile(r"[0-9.][eE][+-]?[0-9]{4}")
_PRODUCT = re.compile(r"\*|\\cdot|\\times|[0-9]\s?[({]")
_EXPONENT = re.compile(r"(?:\^|\*\*)")
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*-?[0-9!.\s]+[\s)}]*(?:\^|\*\*)")
_NESTED = re.compile(r"([0-9]+|[A-Za-z]|[^\s0-9A-Za-z])?[\s{(|]*(?:\^|\*\*)[\s{(|]*-?([0-9]*)")
_GROWING = re.compile(r"!|\\(?:int|sum|prod|lim|[dt]?binom|left\s?\|)(?![A-Za-z])")
_ROOT_INDEX = re.compile(r"\\sqrt\s?\[\s?(?![0-9]{1,3}\s?\]|[A-Za-z]\s?\])")
_PLAIN_EXPONENT = re.compile(r"(?<![)}\]\s])\s{0,8}(?:\^|\*\*)[\s{(]{0,8}-?([0-9]{1,6})")
_ON_BRACKET = re.compile(r"[)}\]|]\s{0,8}(?:\^|\*\*)[\s{(]{0,8}-?([0-9]{1,6})")
_POWER_NUMBER = re.compile(r"(?:\^|\*\*)[\s{(]{0,8}-?([0-9]{1,6})")
_POWER_OF_NUMBER = re.compile(r"([0-9]{1,200})[\s})]{0,8}(?:\^|\*\*)[\s{(]{0,8}([0-9]{1,6})")
_NUMBER = re.compile(r"[0-9]{1,200}")
_FACTORIAL = re.compile(r"([0-9]+)\s{0,8}!")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTION = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp)\b")
_TRIGONOMETRIC = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
_FACTORIAL_OF_GROUP = re.compile(r"(?:[)}\]|.]|\\[A-Za-z]{1,12})\s{0,8}!")
_GAMMA = re.compile(r"\\(?:operatorname\s?\{\s?)?[Gg]amma\b[\s}]{0,4}(?:\\left)?\s{0,4}[({\[|]")
_MATRIX = re.compile(r"\\begin\s?\{[bpvBV]?(?:small)?matrix|\\begin\s?\{array")
_INTEGRAL = re.compile(r"\\i{1,3}nt(?![A-Za-z])|\\oint")
_BIG_ARGUMENT = re.compile(
    r"\\(?:prod|sum|[dt]?binom|choose)\b|(?<![A-Za-z\\])(?:prod|sum|binomial|factorial)\s?\(", re.I
)


def refusal(text: str) -> str | None:
    """Return why `text` must not be parsed, or None. Takes linear time and computes nothing."""
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
    if _ROOT_INDEX.search(text):
        return "a root whose index is no small number"
    for match in _EXPONENT.finditer(text):
        exponent = _group_at(text, match.end())
        if reason := _nested_power_refusal(exponent):
            return reason
        digits = [int(number) for number in re.findall(r"[0-9]+", exponent)]
        product = math.prod(digits) if _PRODUCT.search(exponent) else 0
        if any(number > MAX_EXPONENT for number in (*digits, product)) or ("!" in exponent and digits):
            return f"an exponent above {MAX_EXPONENT}"
        allowed = MAX_HARD_EXPONENT if _TRIGONOMETRIC.search(text) else MAX_SYMBOLIC_EXPONENT
        if any(number > allowed for number in digits) and _FUNCTION.search(text):
            return f"a function with a power above {allowed}"
    variables = {character for character in _COMMAND.sub("", text) if character.isalpha()}
    allowed = MAX_SYMBOLIC_EXPONENT if len(variables) == 1 else MAX_HARD_EXPONENT
    allowed = MAX_MATRIX_EXPONENT if _MATRIX.search(text) else allowed
    on_brackets = [int(exponent) for exponent in _ON_BRACKET.findall(text)]
    stacked = math.prod(max(exponent, 1) for exponent in on_brackets)
    if variables and max([*on_brackets, sum(on_brackets) if len(variables) > 1 else 0], default=0) > allowed:
        return f"brackets to powers above {allowed}"
    if _INTEGRAL.search(text) and any(int(power) > MAX_INTEGRATED for power in _POWER_NUMBER.findall(text)):
        return f"an integral of a power above {MAX_INTEGRATED}"
    inner = max((int(exponent) for exponent in _PLAIN_EXPONENT.findall(text)), default=1)
    if stacked > 1 and stacked * max(inner, 1) > MAX_STACKED_EXPONENT:
        return "exponents on brackets multiply to a huge one"
    if stacked > MAX_ROOT_EXPONENT and "sqrt" in text:
        return f"a bracket with a root to a power above {MAX_ROOT_EXPONENT}"
    if _BIG_ARGUMENT.search(text) and (any(len(number) > 4 for number in re.findall(r"[0-9]+", text)) or _large(text)):
        return "a sum, product or binomial of large numbers"
    return None


def _large(text: str) -> bool:
    return any(math.log10(max(int(base), 1)) * int(power) > 4 for base, power in _POWER_OF_NUMBER.findall(text))


def _nested_power_refusal(exponent: str) -> str | None:
    powers = _EXPONENT.findall(exponent)
    if powers and (len(powers) > 1 or _GROWING.search(exponent)):
        return "an exponent with exponents"
    if _GROWING.search(exponent) and any(character.isdigit() for character in exponent):
        return "an exponent that is a factorial, a sum or a product"
    for base, power in _NESTED.findall(exponent) if powers else ():
        size = int(power or 2)
        if size > MAX_NESTED_EXPONENT and not (base.isdigit() and math.log10(max(int(base), 1)) * size < 4):
            return "an exponent with a large exponent"
        if base.isdigit() and math.log10(max(int(base), 1)) * size > 4:
            return f"an exponent above {MAX_EXPONENT}"
    return None


def _factorial_refusal(text: str) -> str | None:
    marks = text.count("!")
    if any(len(number) > 4 or int(number) > MAX_FACTORIAL for number in _FACTORIAL.findall(text)):
        return f"a factorial of more than {MAX_FACTORIAL}"
    of_bracket = _FACTORIAL_OF_GROUP.search(text) is not None
    gammas = len(_GAMMA.findall(text))
    if gammas and (gammas + marks > 1 or _large(text) or any(int(n) > MAX_FACTORIAL for n in _NUMBER.findall(text))):
        return f"a gamma function of more than {MAX_FACTORIAL}"
    if marks and any(int(number) > MAX_SYMBOLIC_EXPONENT for number in _POWER_NUMBER.findall(text)):
        return "a factorial beside a large power"
    if marks > 8 or re.search(r"!\s{0,8}!", text) or (of_bracket and (marks > 1 or "^" in text or "**" in text)):
        return "a factorial of a huge number"
    if of_bracket and any(int(number) > MAX_FACTORIAL for number in re.findall(r"[0-9]{1,5}", text)):
        return f"a factorial of more than {MAX_FACTORIAL}"
    return None


def _group_at(text: str, start: int) -> str:
    start += len(text) - start - len(text[start:].lstrip())
    if text[start : start + 1] not in ("{", "("):
        return re.match(r"[-+]?[\w.!]*", text[start:]).group()  # type: ignore[union-attr]
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "{(") - (text[position] in "})")
        if depth == 0:
            return text[start : position + 1]
    return text[start:]
