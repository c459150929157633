"""`r1 diagnose`: what a run's numbers and answers show to go wrong, and what to try."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from r1_cli.commands.errors import Existing, user_errors, visible


@click.command(short_help="Say what goes wrong in a run, by its numbers and answers.")
@click.argument("run", type=Existing())
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def diagnose(run: Path, as_json: bool) -> None:
    """Say what goes wrong in RUN: a run's folder or log of r1, EasyR1 or veRL, or TRL's trainer_state.json.

    It may still be going on. Exit code 1 if something is found.

    \b
      r1 diagnose checkpoints/easy_r1/demo
      r1 diagnose outputs/checkpoint-500/trainer_state.json --json
    """
    from r1_cli.runs.diagnose.answers import diagnose_run
    from r1_cli.runs.diagnose.signatures import SIGNATURES
    from r1_cli.runs.history import NoHistoryError
    from r1_cli.runs.reader import RunReader

    with user_errors(NoHistoryError):
        reader = RunReader(run)
        history, found = reader.history, diagnose_run(reader)
    last = int(history.steps[-1]["step"])
    if as_json:
        click.echo(json.dumps({"run": str(run), "step": last, "findings": [asdict(one) for one in found]}, indent=2))
    else:
        for one in found:
            click.secho(one.what, fg="yellow")
            click.echo(f"  {visible(one.evidence)}\n  try: {one.advised}")
        count = (
            f"{len(found)} of {len(SIGNATURES) + 2} known troubles" if found else "nothing of what is known to go wrong"
        )
        click.echo(f"{count}, by {len(history.steps)} records up to step {last}")
    if found:
        raise SystemExit(1)
