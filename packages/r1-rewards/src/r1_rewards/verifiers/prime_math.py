"""The verdict of veRL's `prime_math` (PRIME, arXiv 2502.01456), for comparison with published figures."""

import math
import re

from r1_rewards.reading import prm800k
from r1_rewards.reading.expression import Unreadable, parse
from r1_rewards.reading.extract import TAIL, last_braced
from r1_rewards.reading.guards import refusal
from r1_rewards.reading.truths import emptied_problem
from r1_rewards.types import Score

TOLERANCE = 1e-4
MAX_CHARACTERS = 1_000
MAX_DEPTH = 4  # of lists in lists

_AFTER = ("answer:", "answer is", "answers are")
_BEFORE = ("is answer", "is the answer", "are answers", "are the answers")
_LEADS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_DOLLARS = re.compile(r"\$\d+(\.\d+)?")
_PERCENT = re.compile(r"\d+(\.\d+)?\\?%")
_BRACKETS = str.maketrans(dict.fromkeys("{}()"))


def score(response: str, ground_truth: str) -> Score:
    r"""Return 1 if PRM800K's grade or PRIME's numerical comparison accepts the answer, else 0.

    Numbers within a relative 1e-4 are equal, also at 100 or 1/100 times the ground truth; π is 3.14159… or 3.14;
    `12,34` is 1234. Text that the original evaluates is parsed by `expression` or rejected. Use `math` unless you
    reproduce figures.

    Example: `score("The answer is 3.1416", r"\pi").value` is 1.0.
    """
    extracted = extract_answer(response[-TAIL:])
    right = prm800k.grade(extracted, ground_truth, compact=False) or _equal_for_some_pi(extracted, ground_truth)
    return Score(float(right), {"overall": float(right), "accuracy": float(right)})


def truth_problem(ground_truth: str) -> str | None:
    return emptied_problem(ground_truth, prm800k.normalise)


def extract_answer(response: str) -> str:
    for marker in _AFTER:
        response = _after(response, marker)
    for marker in _BEFORE:
        place = response.lower().rfind(marker)
        response = response if place < 0 else response[:place].strip()
    command = "\\boxed" if "\\boxed" in response else "\\fbox"
    response = (last_braced(response, command) or "").strip() or response
    response = response.rsplit(". ", 1)[0].strip() if ". " in response else response
    for marker in _LEADS:
        response = _after(response, marker)
    return response


def _after(text: str, marker: str) -> str:
    place = text.lower().rfind(marker)
    return text if place < 0 else text[place + len(marker) :].strip()


def _equal_for_some_pi(extracted: str, truth: str) -> bool:
    values = (math.pi, 3.14) if "\\pi" in extracted or "\\pi" in truth else (math.pi,)
    return any(_equal(_prepared(extracted, pi), _prepared(truth, pi), 0) for pi in values)


def _prepared(text: str, pi: float) -> str:
    if _DOLLARS.match(text):
        return text[1:]
    if _PERCENT.fullmatch(text):
        return text.replace("\\", "").replace("%", "")
    if "_" in text:
        digits = _number(text.split("_")[0])
        return "" if digits is None or not math.isfinite(digits) else str(int(digits))
    if "\\pi" not in text:
        return text
    written = re.sub(r"(\d?)\\pi", lambda match: f"{match[1]}*{pi}" if match[1] else f"1*{pi}", text)
    value = _value(written)
    return written if value is None else repr(value)


def _equal(extracted: str, truth: str, depth: int) -> bool:
    extracted = extracted[:MAX_CHARACTERS]
    if extracted.strip().lower() == truth.strip().lower() or extracted.replace(" ", "") == truth.replace(" ", ""):
        return True
    left, right = _number(extracted), _number(truth)
    if left is not None and right is not None:
        return any(math.isclose(item, left, rel_tol=TOLERANCE) for item in (right / 100, right, right * 100))
    extracted, truth = extracted.strip(), truth.strip()
    if not extracted:
        return False
    # The original ends with SymPy, but swallows an error there: what comes so far is unequal.
    return _unbracketed(extracted, truth) or (depth < MAX_DEPTH and _equal_lists(extracted, truth, depth))


def _unbracketed(extracted: str, truth: str) -> bool:
    in_square = extracted.startswith("[") and extracted.endswith("]") and not truth.startswith("(")
    in_round = extracted.startswith("(") and extracted.endswith(")") and not truth.startswith("[")
    if in_square or in_round:
        extracted, truth = extracted.strip("[]()"), truth.strip("[]()")
    return extracted.translate(_BRACKETS) == truth.translate(_BRACKETS)


def _equal_lists(extracted: str, truth: str, depth: int) -> bool:
    if "," not in extracted or "," not in truth:
        return False
    if (
        truth
        and extracted[0] in "(["
        and extracted[-1] in ")]"
        and (extracted[0], extracted[-1]) == (truth[0], truth[-1])
    ):
        extracted, truth = extracted[1:-1], truth[1:-1]
    parts = [[part.strip() for part in text.split(",")] for text in (extracted, truth)]
    return len(parts[0]) == len(parts[1]) and all(
        _equal(left, right, depth + 1) for left, right in zip(parts[0], parts[1], strict=True)
    )


def _number(text: str) -> float | None:
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def _value(text: str) -> float | None:
    if "^" in text or refusal(text):
        return None
    try:
        value = float(parse(text))
    except (Unreadable, TypeError, ValueError, ArithmeticError, RecursionError):
        return None
    return value if math.isfinite(value) else None
