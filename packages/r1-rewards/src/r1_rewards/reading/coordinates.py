"""Read the boxes and points that a response names, in linear time."""

import re

from r1_rewards.reading.extract import TAIL

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # x1, y1, x2, y2

_GROUP = re.compile(r"[\[(]([^\[\]()]{1,200})[\])]")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")


def last_box(text: str) -> Box | None:
    """Return the last group of four numbers in brackets or parentheses, or of two groups of two, or None.

    Read are "[1, 2, 3, 4]", "(1,2),(3,4)" and "<box>1 2 3 4"-like text with brackets; other groups are skipped.
    """
    groups = _groups(text)
    for place in range(len(groups) - 1, -1, -1):
        if len(groups[place]) == 4:
            x1, y1, x2, y2 = groups[place]
            return x1, y1, x2, y2
        if place and len(groups[place]) == len(groups[place - 1]) == 2:
            return groups[place - 1][0], groups[place - 1][1], groups[place][0], groups[place][1]
    return None


def last_point(text: str) -> Point | None:
    """Return the last group in brackets if it is a pair of numbers, or None."""
    groups = _groups(text)
    return (groups[-1][0], groups[-1][1]) if groups and len(groups[-1]) == 2 else None


def _groups(text: str) -> list[list[float]]:
    """Return the groups in brackets that hold numbers only, separated by commas or blanks."""
    groups = []
    for match in _GROUP.finditer(text[-TAIL:]):
        words = match[1].replace(",", " ").split()
        if words and all(_NUMBER.fullmatch(word) for word in words):
            groups.append([float(word) for word in words])
    return groups
