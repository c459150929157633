"""Score a short answer by the kind of its ground truth: a choice, a number with a tolerance, mathematics or words."""

import ast
import math as numbers
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from r1_rewards.reading import extract
from r1_rewards.reading.truths import blank_problem, read_truths
from r1_rewards.types import Score
from r1_rewards.verifiers import choice, math, numeric, text

TAKES = ("choices", "precision", "error")  # of MathVista, MMMU-Pro, OlympiadBench

_LETTER = re.compile(r"[A-J]|\([A-Ja-j]\)")
_LISTED = re.compile(r"""\s*\[\s*(?:['"]|\])""")
Choices = str | Sequence[str] | Mapping[str, str]


def score(
    response: str,
    ground_truth: str | Sequence[str],
    *,
    choices: Choices | None = None,
    relative: float = 0.0,
    absolute: float = 0.0,
    precision: float | str | None = None,
    error: float | str | None = None,
) -> Score:
    r"""Return 1 if the response's final answer is the ground truth, or one of several, else 0.

    With `choices` (a list, or one written as text), it is scored as by `choice`, and an answer equal to one choice
    counts as its letter. A ground truth of one letter from A to J is a choice, too. A number may differ by the largest
    of `relative` · |ground truth|, `absolute`, `error`, and half a unit of the last of `precision` decimals, as
    `numeric` does; other answers are compared by `math`, then as by `text`. Several ground truths are a list, as JSON
    or as Python writes it. Raises ValueError for a blank ground truth and for a tolerance that is no number.

    Example: `score("Answer: 14.5", "14", relative=0.05).value` is 1.0.
    """
    truths = _truths(ground_truth)
    if options := read_choices(choices):
        return _score_choice(response, truths[0], options)
    tolerance = max(absolute, _number("error", error) or 0.0, _half_unit(precision))
    scores = [_score_one(response, truth, relative, tolerance) for truth in truths]
    return max(scores, key=lambda found: found.value)


def truth_problem(
    ground_truth: str,
    *,
    choices: Choices | None = None,
    precision: float | str | None = None,
    error: float | str | None = None,
) -> str | None:
    if problem := blank_problem(ground_truth):
        return problem
    try:
        options, _ = read_choices(choices), (_half_unit(precision), _number("error", error))
    except ValueError as problem_of_row:
        return str(problem_of_row)
    return choice.truth_problem(_as_letter(_truths(ground_truth)[0]), choices=options) if options else None


def read_choices(choices: Choices | None) -> dict[str, str]:
    """Return choices by letter; a text is read as a list, as MMMU writes it. Raises ValueError for another text."""
    if isinstance(choices, Mapping):
        return dict(choices)
    listed = _read_list(choices) if isinstance(choices, str) else list(choices or ())
    if listed is None:
        raise ValueError(f"choices is {str(choices)[:80]!r}; it must be a list of texts")
    return dict(zip(ascii_uppercase, map(str, listed), strict=False))


def _score_choice(response: str, truth: str, options: Mapping[str, str]) -> Score:
    found = choice.score(response, _as_letter(truth), choices=options)
    said = extract.final_answer(response) if found.extracted is None else None
    equal = [letter for letter, option in options.items() if said and math.score(response, option).value == 1.0]
    return choice.score(equal[0], _as_letter(truth), choices=options) if len(equal) == 1 else found


def _score_one(response: str, truth: str, relative: float, tolerance: float) -> Score:
    if _LETTER.fullmatch(truth.strip()):
        return choice.score(response, _as_letter(truth))
    found = None
    if (relative or tolerance) and numeric.read_quantity(truth) is not None:
        found = numeric.score(response, truth, relative=relative, absolute=tolerance)
    if found is None or found.value < 1.0:
        by_algebra = math.score(response, truth)
        found = by_algebra if found is None or by_algebra.value == 1.0 else found
    if found.value < 1.0 and not any(map(str.isdigit, truth)):
        by_words = text.score(response, truth)
        found = by_words if by_words.value == 1.0 else found
    accuracy = found.value
    return Score(accuracy, {"overall": accuracy, "accuracy": accuracy}, extracted=found.extracted, reason=found.reason)


def _as_letter(truth: str) -> str:
    return truth.upper() if _LETTER.fullmatch(truth.strip()) else truth


def _truths(ground_truth: str | Sequence[str]) -> list[str]:
    listed = _read_list(ground_truth) if isinstance(ground_truth, str) else None
    return read_truths(listed or ground_truth)


def _read_list(written: str) -> list[str] | None:
    if not _LISTED.match(written):
        return None
    try:
        found = ast.literal_eval(written.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else None


def _half_unit(precision: float | str | None) -> float:
    decimals = _number("precision", precision)
    return 0.0 if decimals is None else 0.5 * 10.0**-decimals


def _number(name: str, value: float | str | None) -> float | None:
    """Return a column's number, or None for nothing, NaN and several numbers ("0.1,0.2")."""
    if value is None or value == "" or (isinstance(value, str) and "," in value):
        return None
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if numbers.isnan(number):
        return None
    if number < 0 or numbers.isinf(number):
        raise ValueError(f"{name} is {value!r}; it must be a number, 0 or more")
    return number
