"""The verdict of veRL's `gsm8k`, for comparison with published figures."""

import re
from typing import Literal

from r1_rewards.types import Score

TAIL = 300  # characters

_HASHED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def score(response: str, ground_truth: str, *, method: Literal["strict", "flexible"] = "strict") -> Score:
    """Return 1 if the last `#### x` in the final 300 characters is the ground truth as text, else 0.

    `flexible` uses the last number as it stands: "5." is not "5" there.

    Example: `score("#### 1,200", "1200").value` is 1.0.
    """
    tail = response[-TAIL:]
    if method == "strict":
        found = [number.replace(",", "") for number in _HASHED.findall(tail)]
    else:
        found = [number for number in _NUMBER.findall(tail) if number != "."]
    right = bool(found) and found[-1] == ground_truth
    return Score(float(right), {"overall": float(right), "accuracy": float(right)})


def truth_problem(ground_truth: str, *, method: Literal["strict", "flexible"] = "strict") -> str | None:
    if re.fullmatch("-?[0-9.]+" if method == "strict" else "-?[0-9.,]+", ground_truth):
        return None
    return f"the truth {ground_truth[:80]!r} is no bare number" + (" without commas" if method == "strict" else "")
