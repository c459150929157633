"""The HTML page of `r1 run`: its stages, what each gained, and links to the reports of their runs."""

import os
from html import escape
from pathlib import Path

from r1_cli.runs.history import NoHistoryError
from r1_cli.runs.html import render_page, table
from r1_cli.runs.reader import RunReader
from r1_cli.runs.report.chart import draw, number
from r1_cli.runs.report.page import write_report
from r1_cli.runs.stages import StageResult, read_object, read_stage_results

CURVES = ("val/nll", "val/reward_score", "sft/loss", "actor/loss", "reward/overall")


def write_stages_report(root: Path, file: Path | None = None) -> Path:
    """Write the page about a folder of `r1 run`, and beside each stage that logged steps, its own report."""
    file = file or root / "report.html"
    title, results = read_stage_results(root)
    rows, parts = [], list[str]()
    for one in results:
        rows.append((one.name, f"{one.seconds:,.1f} s", one.measured, one.output or "not complete", one.typed))
        parts += [f"<h2>{escape(one.name)}</h2>", *_describe(one, file.parent)]
    head = table(rows, ("stage", "time", "accuracy", "output", "command"))
    file.write_text(render_page(title, f"<h1>{escape(title)}</h1>{head}{''.join(parts)}"), encoding="utf-8")
    return file


def _describe(one: StageResult, beside: Path) -> list[str]:
    if one.output is not None and one.output.suffix == ".json":
        found = read_object(one.output)
        return [table([(key, value) for key, value in found.items() if isinstance(value, int | float | str)])]
    try:
        page, history = write_report(one.folder), RunReader(one.folder).history
    except (NoHistoryError, OSError):
        return [f"<p>{escape(str(one.output or 'not complete'))}</p>"]
    file = one.folder / "report.html"
    file.write_text(page, encoding="utf-8", errors="replace")
    series = {name: points for name in CURVES if (points := history.series(name))}
    told = [f"{name}: {number(points[0][1])} to {number(points[-1][1])}" for name, points in series.items()]
    return [
        f"<p class=lead>{escape(' · '.join(told))}</p>",
        "<div class=grid>", *(draw(name, points) for name, points in series.items()), "</div>",
        f'<p><a href="{escape(os.path.relpath(file, beside))}">the report of this stage</a></p>',
    ]  # fmt: skip
