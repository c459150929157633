"""`r1 check`: everything that can be known to be wrong before a run begins."""

import json

import click

from r1_cli.commands.errors import ANY_WORDS, visible
from r1_cli.commands.threads import share_processors

STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


@click.command(short_help="Check configuration, machine, model, data, reward before a run.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--no-step", is_flag=True, help="Make no tiny step, which takes some seconds.")
def check(settings: tuple[str, ...], as_json: bool, no_step: bool) -> None:
    """Check a run before it begins: configuration, machine, model, some rows, reward, one tiny step.

    Exit code 1 if there is an error. `r1 data check` looks at all rows, `r1 reward test` at a reward more closely.

    \b
      r1 check run.yaml
      r1 check run.yaml trainer.max_steps=100 --no-step --json
    """
    share_processors()
    from rich.console import Console

    from r1_cli.preflight.checks import PARTS, run_checks

    console, found = Console(), []
    for one in run_checks(settings, [part for part in PARTS if part != "step" or not no_step]):
        found.append(one)
        if not as_json:
            console.print(one.level, style=STYLES[one.level], end="  ")
            console.print(visible(one.message), markup=False, highlight=False, soft_wrap=True)
            if one.fix:
                console.print(f"  → {visible(one.fix)}", markup=False, highlight=False, soft_wrap=True)
    errors = sum(one.level == "error" for one in found)
    if as_json:
        click.echo(json.dumps({"ok": not errors, "findings": [one.as_json() for one in found]}, indent=2))
    else:
        click.echo(f"{errors} {'error' if errors == 1 else 'errors'}" if errors else "nothing stands in the way")
    if errors:
        raise SystemExit(1)
