"""Score as DAPO does: 1 or -1 for the text after "Answer:", and a penalty for overlong responses."""

import re

from r1_rewards.reading.truths import emptied_problem
from r1_rewards.types import Score
from r1_rewards.verifiers.length import overlong_punishment

TAIL = 300  # characters; an answer stated before them does not count

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# Minerva's normalisation (arXiv 2206.14858), in its order: later entries see what earlier ones left.
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_WRAPPED = [re.compile(rf"\\{command}\{{([^}}]*)\}}") for command in ("text", "textbf", "overline")]
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def score(
    response: str,
    ground_truth: str,
    *,
    max_response_length: int | None = None,
    overlong_buffer_length: int = 0,
    overlong_penalty_factor: float = 1.0,
    response_length: int = 0,
) -> Score:
    r"""Return accuracy plus overlong penalty (DAPO, arXiv 2503.14476; the verdict of EasyR1's `dapo`).

    `accuracy` is 1 if the last "Answer: x" in the final 300 characters equals the ground truth after Minerva's
    normalisation, else -1; `accuracy_normalized` is 1 or 0. `overlong` is at most 0, and 0 without a
    `max_response_length` (tokens).

    Example: `score("It is\nAnswer: 5 cm", "5").value` is 1.0.
    """
    accuracy = 1.0 if normalise(final_answer(response)) == normalise(ground_truth) else -1.0
    overlong = 0.0
    if max_response_length is not None:
        overlong = overlong_punishment(
            response_length, max_response_length, overlong_buffer_length, overlong_penalty_factor
        )
    parts = {"accuracy": accuracy, "overlong": overlong, "accuracy_normalized": 0.5 * (accuracy + 1.0)}
    return Score(accuracy + overlong, {"overall": accuracy + overlong, **parts})


def truth_problem(ground_truth: str) -> str | None:
    if "\n" in normalise(ground_truth):
        return f"the truth {ground_truth[:80]!r} has several lines, and an answer is one line"
    return emptied_problem(ground_truth, normalise)


def final_answer(response: str) -> str:
    stated = _ANSWER.findall(response[-TAIL:])
    return stated[-1] if stated else "[INVALID]"


def normalise(extracted: str) -> str:
    text = extracted.split("=")[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = "\n".join(map(_without_wrappers, text.split("\n")))
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _without_wrappers(line: str) -> str:
    if line.count("$") >= 2:
        line = "$" + line.split("$", 2)[1] + "$"
    for wrapped in _WRAPPED:
        end = line.rfind("}") + 1  # what follows has no closing brace to look for
        line = wrapped.sub(r"\1", line[:end]) + line[end:]
    start, end = line.find("\\boxed{"), line.rfind("}")
    return line[:start] + line[start + len("\\boxed{") : end] + line[end + 1 :] if 0 <= start < end else line
