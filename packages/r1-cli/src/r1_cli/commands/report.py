"""`r1 report`: a run in one file to keep or to send."""

from pathlib import Path

import click

from r1_cli.commands.errors import Existing, user_errors, writing


@click.command(short_help="Write a run's curves, validation and samples into one HTML file.")
@click.argument("run", type=Existing())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: RUN/report.html.")
def report(run: Path, output: Path | None) -> None:
    """Write one HTML file about RUN, a run's folder: what ran, curves, validation, time, faults, samples.

    It needs no network and nothing beside it, holds no script, and shows answers as text. The run may still go on.

    \b
      r1 report checkpoints/easy_r1/demo
      r1 report checkpoints/easy_r1/demo --output demo.html
    """
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.report.page import write_report

    file = output or (run if run.is_dir() else run.parent) / "report.html"
    with user_errors(NoHistoryError, OSError):
        page = write_report(run)
    with writing(file):
        file.write_text(page, encoding="utf-8", errors="replace")
    click.echo(f"{file} ({file.stat().st_size / 1e6:.2f} MB)")
