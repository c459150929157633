"""The report of a data check on the terminal."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from r1_cli.plan.announce import found_format, show_table
from r1_cli.plan.data_check.findings import TITLES, Report

BAR = 40  # characters of the longest bar


def show(console: Console, report: Report) -> None:
    show_table(console, _sources(report))
    if bins := report.histogram():
        most = max(rows for _, _, rows in bins)
        console.print(report.lengths, style="bold")
        for low, high, rows in bins:
            bar = "█" * round(BAR * rows / most)
            console.print(f"{low:>7,} – {high - 1:<7,} {bar} {rows:,}", highlight=False)
    if line := report.step_line():
        console.print(f"\n{line}\n", highlight=False)
    findings = report.ordered()
    for finding in findings:
        style = "red" if finding.level == "error" else "yellow"
        title = TITLES.get(finding.kind, finding.kind)
        consequence = f": {finding.consequence}" if finding.consequence else ""
        line = f"[{style}]{finding.level}[/{style}]  {finding.count:,} × {title}{consequence}"
        console.print(line, highlight=False, soft_wrap=True)
        for reason, _ in finding.examples:
            console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
        if finding.count > len(finding.examples):
            console.print(
                f"  … and {finding.count - len(finding.examples):,} more; --rows FILE writes all", style="dim"
            )
    if not findings:
        console.print("nothing to complain about")
    for title, text in report.examples():
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(text, soft_wrap=True)


def _sources(report: Report) -> Table:
    right = {"justify": "right"}
    headings = [Column("source", overflow="fold"), Column("format"), Column("prompt and answer", overflow="fold")]
    headings += [Column(name, **right) for name in ("rows", "usable", "left out", "media", "mean", "longest")]  # type: ignore[arg-type]
    tuned = any(tally.answers for tally in report.sources)
    headings += [Column(name, **right) for name in ("answers", "trained") if tuned]  # type: ignore[arg-type]
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for tally in report.sources:
        table.add_row(
            escape(tally.name) + (" (validation)" if tally.validation else ""),
            *found_format(tally.opened),
            f"{len(tally.opened.rows):,}",
            f"{tally.usable:,}",
            f"{tally.left_out:,}",
            f"{tally.media:,}",
            f"{tally.mean_tokens:.0f}",
            f"{max(tally.tokens, default=0):,}",
            *([f"{tally.answers:,}", f"{tally.trained:,}"] if tuned else []),
        )
    return table
