"""Rewards that make the bad runs under `runs/`: each is a way in which people's rewards go wrong."""

import re
import time
from collections import deque
from typing import Any

REWARD_TYPE = "sequential"
LENGTHS: deque[int] = deque(maxlen=64)


def _right(given: dict[str, Any]) -> float:
    found = re.search(r"\\boxed\{(\d+)\}", given["response"])
    return float(found is not None and found[1] == given["ground_truth"])


def fails(given: dict[str, Any]) -> dict[str, float]:
    """One answer in four."""
    if len(given["response"]) % 4 == 0:
        raise KeyError("answer")
    return {"overall": _right(given), "accuracy": _right(given)}


def sleeps(given: dict[str, Any]) -> dict[str, float]:
    time.sleep(0.02)
    return {"overall": _right(given), "accuracy": _right(given)}


def constant(given: dict[str, Any]) -> dict[str, float]:
    """The same for all."""
    return {"overall": 0.1, "accuracy": _right(given)}


def wordy(given: dict[str, Any]) -> dict[str, float]:
    """For stars, which the model is to count with; hardly for the right number."""
    form = min(given["response"].count("*") / 8, 1.0)
    return {"overall": 0.9 * form + 0.1 * _right(given), "format": form, "accuracy": _right(given)}


def three(given: dict[str, Any]) -> dict[str, float]:
    """For one and the same answer, whatever was asked."""
    return {"overall": 0.5 * float("\\boxed{3}" in given["response"]), "accuracy": _right(given)}


def longer(given: dict[str, Any]) -> dict[str, float]:
    """For being longer than half of those before: in the end nobody earns more by it."""
    length = len(given["response"])
    beaten = sum(length > one for one in LENGTHS) / max(len(LENGTHS), 1)
    LENGTHS.append(length)
    return {"overall": 0.8 * (beaten > 0.5), "accuracy": _right(given)}


def huge(given: dict[str, Any]) -> dict[str, float]:
    """Beyond what gradients can hold."""
    return {"overall": 1e37 * _right(given), "accuracy": _right(given)}
