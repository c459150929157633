"""The HTML page of `r1 run`: its stages, what each gained, and links to the reports of their runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from r1_cli.runs.history import NoHistoryError
from r1_cli.runs.html import render_page, table
from r1_cli.runs.reader import RunReader
from r1_cli.runs.report.chart import draw, number
from r1_cli.runs.report.page import write_report

CURVES = ("val/nll", "val/reward_score", "sft/loss", "actor/loss", "reward/overall")


@dataclass(frozen=True, slots=True)
class StageResult:
    name: str
    command: str  # as typed
    folder: Path
    output: Path
    seconds: float


def write_stages_report(file: Path, title: str, results: Sequence[StageResult]) -> None:
    """Write the page, and beside the folder of each stage that logged steps, its own report."""
    rows, parts = [], list[str]()
    for one in results:
        rows.append((one.name, f"{one.seconds:,.1f} s", one.output, one.command))
        parts += [f"<h2>{escape(one.name)}</h2>", *_describe(file.parent, one)]
    head = table(rows, ("stage", "time", "output", "command"))
    file.write_text(render_page(title, f"<h1>{escape(title)}</h1>{head}{''.join(parts)}"), encoding="utf-8")


def _describe(root: Path, one: StageResult) -> list[str]:
    if one.output.suffix == ".json":
        found = json.loads(one.output.read_text())
        return [table([(key, value) for key, value in found.items() if isinstance(value, int | float | str)])]
    try:
        page, history = write_report(one.folder), RunReader(one.folder).history
    except (NoHistoryError, OSError):
        return [f"<p>{escape(str(one.output))}</p>"]
    file = one.folder / "report.html"
    file.write_text(page, encoding="utf-8", errors="replace")
    series = {name: points for name in CURVES if (points := history.series(name))}
    told = [f"{name}: {number(points[0][1])} to {number(points[-1][1])}" for name, points in series.items()]
    return [
        f"<p class=lead>{escape(' · '.join(told))}</p>",
        "<div class=grid>", *(draw(name, points) for name, points in series.items()), "</div>",
        f'<p><a href="{escape(str(file.relative_to(root)))}">the report of this stage</a></p>',
    ]  # fmt: skip
