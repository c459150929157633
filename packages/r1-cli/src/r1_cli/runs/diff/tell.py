"""What differs between two runs, as lines of a terminal."""

import json
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size

from r1_cli.runs.diff.differences import Differences
from r1_cli.runs.track.view import visible

WIDTH = 100  # columns
NAME = 40
MOST = 40  # changes of a section that are shown


def tell(found: Differences) -> Iterator[str]:
    """Yield lines of at most `WIDTH` columns, free of what controls a terminal."""
    for section, changes in found.changes.items():
        if not changes:
            continue
        yield f"{section}: {len(changes)} differ"
        for one in changes[:MOST]:
            yield _line(one.name, _short(one.first), _short(one.second))
        if len(changes) > MOST:
            yield f"  and {len(changes) - MOST} more: --json has all"
    yield from (f"not known: {one}" for one in found.unknown)
    if not any(found.changes.values()) and not found.unknown:
        yield "settings, rows, code, packages and machine are the same"
    yield _say_equal(found)
    for curve in found.curves:
        how = "parts at" if curve.parts else "together to"
        steps = f"{how} step {curve.begin if curve.parts else curve.end}"
        means = f"{curve.first:.5g} and {curve.second:.5g}, ± {curve.error:.2g}"
        yield _crop(f"  {set_cell_size(curve.name, 28)}{steps:<26}{means}")


def _say_equal(found: Differences) -> str:
    if not found.steps:
        return "no step that both have"
    if found.unequal is None:
        return f"numbers: identical in all {found.steps} records that both have (times and rates aside)"
    step, names = found.unequal
    seeds = {True: "the same seeds", False: "other seeds", None: "seeds not known"}[found.same_seeds]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return _crop(f"numbers ({seeds}): the first that differ are of step {step}: {', '.join(names[:2])}{more}")


def _line(name: str, first: str, second: str) -> str:
    name = visible(name)
    shown = name if cell_len(name) <= NAME else "…" + name[-NAME + 1 :]
    room = (WIDTH - NAME - 8) // 2
    return f"  {set_cell_size(shown, NAME)}  {set_cell_size(_tail(first, room), room)}  {_tail(second, room)}".rstrip()


def _tail(text: str, room: int) -> str:
    """Return a text in `room` columns, its middle left out: paths differ at their ends, lists at their beginnings."""
    if cell_len(text) <= room:
        return text
    half = (room - 1) // 2
    return set_cell_size(text[:half], half).rstrip() + "…" + text[-half // 2 :]


def _crop(text: str) -> str:
    text = visible(text)
    return text if cell_len(text) <= WIDTH else set_cell_size(text, WIDTH - 1) + "…"


def _short(value: Any) -> str:
    if value is None:
        return "—"
    return visible((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).replace("\n", " "))
