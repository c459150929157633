"""Score a GSM8K response by its final number."""

import re
from fractions import Fraction

from r1_rewards.reading import extract
from r1_rewards.reading.hedges import in_context
from r1_rewards.reading.notation import SCALE
from r1_rewards.reading.number import parse_number, side_by_side
from r1_rewards.reading.plain_text import plain_characters
from r1_rewards.types import Score

_SCALED = re.compile(rf"\s?({'|'.join(SCALE)}|k)s?\b", re.IGNORECASE)


def score(response: str, ground_truth: str) -> Score:
    r"""Return 1 if the response's final number equals the ground truth's exactly, else 0.

    `ground_truth` is a published solution ("… #### 18") or the number. After the thought, the number is searched in the
    last `\boxed{}`, then after `####`, in `<answer>`, after "answer is" or "Answer:", then the last number. Commas,
    `$`, `%`, units and trailing zeros are ignored. Data set: arXiv 2110.14168.

    Example: `score("She makes 9 * 2 = $18.00 a day. #### 18.00", "#### 18").value` is 1.0.
    """
    expected = final_number(ground_truth)
    found = final_number(extract.after_thought(response))
    accuracy = float(expected is not None and found == expected)
    reason = "there is no final number" if found is None else "the same number" if accuracy else "another number"
    extracted = None if found is None else str(found)
    return Score(accuracy, {"overall": accuracy, "accuracy": accuracy}, extracted=extracted, reason=reason)


def truth_problem(ground_truth: str) -> str | None:
    return None if final_number(ground_truth) is not None else f"the truth {ground_truth[:80]!r} has no number"


def final_number(text: str) -> Fraction | None:
    """Return the number that `text` ends with, or None if there is none or the text denies it."""
    text = plain_characters(text[-extract.TAIL :])
    for find in (extract.boxed, extract.hashed, extract.tagged, extract.stated):
        extracted = find(text)
        if extracted is not None:
            if side_by_side(extracted):
                return None
            number = _number_in(extracted)
            if number is not None:
                return number
    last = extract.last_number(text)
    return None if last is None else _in_words(last, *text.rpartition(last)[::2])


def _number_in(extracted: str) -> Fraction | None:
    number = parse_number(extracted)
    if number is not None:
        return number
    said = extracted.rsplit("=", 1)[-1]
    first = extract.first_number(said)
    return None if first is None else _in_words(first, *said.partition(first)[::2])


def _in_words(number: str, before: str, behind: str) -> Fraction | None:
    if in_context(number, before, behind).startswith("not "):
        return None
    value, scale = parse_number(number), _SCALED.match(behind[:20])
    return value * SCALE.get(scale[1].lower(), 1000) if value is not None and scale else value
