"""Parameters by pattern: which names a user's regular expression means, and near ones where it means none."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

SHOWN = 5


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a regular expression matches from beginning to end.

    Raises:
        ValueError: it is no regular expression, or matches none of them; shows those that come near.
    """
    names = list(names)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if found := [name for name in names if compiled.fullmatch(name)]:
        return found
    near = ", ".join(nearest(pattern, names)) or "there are none"
    raise ValueError(f"{pattern!r} matches none of {len(names)} names from beginning to end; near ones are: {near}")


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that share most with a pattern, nearest first, one of each kind of layer."""
    wanted = re.sub(r"[^\w.]", "", pattern.replace("\\", "").replace(".*", "")).strip(".").lower()
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "0", name), name)
    scores = {name: _likeness(wanted, name.lower()) for name in kinds.values()}
    return sorted(scores, key=lambda name: -scores[name])[:SHOWN]


def _likeness(wanted: str, name: str) -> float:
    """How alike a pattern's letters are to a name, or to a part of it between dots."""
    parts = [*name.split("."), name]
    return max(SequenceMatcher(None, wanted, part, autojunk=False).ratio() for part in parts)
