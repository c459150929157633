"""Score a bounding box by its overlap with the true one: intersection over union."""

import re

from r1_rewards.reading.extract import TAIL
from r1_rewards.types import Score

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # x1, y1, x2, y2

_GROUP = re.compile(r"[\[(]([^\[\]()]{1,200})[\])]")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")


def score(response: str, ground_truth: str, *, threshold: float | None = None) -> Score:
    """Return the intersection over union (`iou`) of the response's last box and the true one, each `[x1, y1, x2, y2]`.

    Boxes may stand in brackets or parentheses, in JSON or alone, in the ground truth's units. With a `threshold`, the
    value is 1 from there on, else 0. A missing box, or one with swapped corners, scores 0. Raises ValueError if the
    ground truth has no box.

    Example: `score("<answer>[0, 0, 10, 10]</answer>", "[0, 0, 10, 5]").value` is 0.5.
    """
    truth = last_box(ground_truth)
    if truth is None:
        raise ValueError(truth_problem(ground_truth))
    box = last_box(response)
    iou = 0.0 if box is None else overlap(box, truth)
    value = iou if threshold is None else float(iou >= threshold)
    return Score(value, {"overall": value, "iou": iou})


def truth_problem(ground_truth: str) -> str | None:
    truth = last_box(ground_truth)
    if truth is None:
        return f"the truth {ground_truth[:80]!r} has no box; write it as [x1, y1, x2, y2]"
    return None if overlap(truth, truth) > 0 else f"the truth {ground_truth[:80]!r} is a box without an area"


def overlap(left: Box, right: Box) -> float:
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    areas = [max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0) for box in (left, right)]
    if width <= 0 or height <= 0 or min(areas) <= 0:
        return 0.0
    shared = width * height
    return shared / (areas[0] + areas[1] - shared)


def last_box(text: str) -> Box | None:
    """Return the last group of four numbers in brackets or parentheses, or of two groups of two."""
    groups = _groups(text)
    for place in range(len(groups) - 1, -1, -1):
        if len(groups[place]) == 4:
            x1, y1, x2, y2 = groups[place]
            return x1, y1, x2, y2
        if place and len(groups[place]) == len(groups[place - 1]) == 2:
            return groups[place - 1][0], groups[place - 1][1], groups[place][0], groups[place][1]
    return None


def last_point(text: str) -> Point | None:
    groups = _groups(text)
    return (groups[-1][0], groups[-1][1]) if groups and len(groups[-1]) == 2 else None


def _groups(text: str) -> list[list[float]]:
    groups = []
    for match in _GROUP.finditer(text[-TAIL:]):
        words = match[1].replace(",", " ").split()
        if words and all(_NUMBER.fullmatch(word) for word in words):
            groups.append([float(word) for word in words])
    return groups
