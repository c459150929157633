"""`r1 diff`: what two runs were given that is not the same, and where their curves part."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.cells import cell_len, set_cell_size

from r1_cli.commands.errors import told_plainly, visible

if TYPE_CHECKING:
    from r1_cli.after.differences import Differences

WIDTH = 100  # columns
NAME = 40
MOST = 40  # changes of a section that are shown
RUN = click.Path(exists=True, path_type=Path)


@click.command(short_help="Say what differs between two runs, and where they part.")
@click.argument("run_a", type=RUN)
@click.argument("run_b", type=RUN)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def diff(run_a: Path, run_b: Path, as_json: bool) -> None:
    """Say what differs between two runs: settings, rows, code, packages, machine, and where their curves part.

    They may still be going on. Logs of EasyR1, veRL and TRL are read, too; of those only the curves are known.

    \b
      r1 diff checkpoints/easy_r1/demo checkpoints/easy_r1/demo_2
    """
    from r1_cli.after.differences import compare
    from r1_cli.after.run import read_run
    from r1_cli.look.history import NoHistoryError

    with told_plainly(NoHistoryError):
        found = compare(read_run(run_a), read_run(run_b))
    if as_json:
        click.echo(json.dumps({"runs": [str(run_a), str(run_b)], **asdict(found)}, indent=2))
        return
    for line in tell(found):
        click.echo(line)


def tell(found: "Differences") -> Iterator[str]:
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


def _say_equal(found: "Differences") -> str:
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
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).replace("\n", " ")
