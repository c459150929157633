"""Ranges of the settings of estimators and losses, declared in a setting's type and enforced by `check_settings`."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers; NaN is in none."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def fault(self, value: float) -> str | None:
        """Return what the value must be, or None. Example: `Range(least=0).fault(-1) == "must be at least 0"`."""
        if math.isnan(value):
            return "must be a number"
        if self.least is not None and value < self.least:
            return f"must be at least {self.least:g}"
        if self.above is not None and value <= self.above:
            return f"must be more than {self.above:g}"
        if self.most is not None and value > self.most:
            return f"must be at most {self.most:g}"
        if self.below is not None and value >= self.below:
            return f"must be below {self.below:g}"
        return None


Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
ClipWidth = Annotated[float, Range(least=0, below=1)]  # of a ratio, on its lower side
DualClip = Annotated[float, Range(above=1)]  # of a ratio; infinity: none


def fault(kind: Any, value: Any) -> str | None:
    """Return what a value must be to match a type such as `Positive | None`; None if it does."""
    if get_origin(kind) is Literal and value not in get_args(kind):
        return f"must be one of {', '.join(map(str, get_args(kind)))}"
    for part in (kind, *get_args(kind)):
        for mark in getattr(part, "__metadata__", ()):
            if isinstance(mark, Range) and isinstance(value, int | float):
                return mark.fault(value)
    return None


def check_settings(owner: Any) -> None:
    """Raise ValueError if a dataclass's field is outside the range of its type."""
    for field in fields(owner):
        value, kind = getattr(owner, field.name), field.type
        if isinstance(kind, str):  # of a module with `from __future__ import annotations`
            kind = get_type_hints(type(owner), include_extras=True)[field.name]
        if wrong := fault(kind, value):
            raise ValueError(f"{field.name} is {value}; it {wrong}")
