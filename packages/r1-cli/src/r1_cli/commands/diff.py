"""`r1 diff`: what two runs were given that is not the same, and where their curves part."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from r1_cli.commands.errors import Existing, user_errors

RUN = Existing()


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
    from r1_cli.runs.diff import compare, format_differences
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.reader import RunReader

    with user_errors(NoHistoryError):
        found = compare(RunReader(run_a), RunReader(run_b))
    if as_json:
        click.echo(json.dumps({"runs": [str(run_a), str(run_b)], **asdict(found)}, indent=2))
        return
    for line in format_differences(found):
        click.echo(line)
