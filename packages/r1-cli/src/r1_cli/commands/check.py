"""`r1 check`: find what is wrong before a run starts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import ANY_WORDS, share_processors, user_errors, visible

if TYPE_CHECKING:
    from r1_cli.plan.check.findings import Finding

STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


@click.command(short_help="Check configuration, machine, model, data, reward before a run.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL | CONFIG.yaml] [KEY=VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--no-step", is_flag=True, help="Skip the tiny training step, which takes seconds; of --device two runs.")
@click.option("--device", is_flag=True, help="Check what this machine's GPU, or CPU, computes; needs no configuration.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    help="Precision of MODEL.",
    show_default=True,
)
def check(settings: tuple[str, ...], as_json: bool, no_step: bool, device: bool, precision: str) -> None:
    """Check a run before it starts: configuration, machine, model, some rows, reward, one tiny step.

    Or check a MODEL, a folder or a name on the hub: whether r1 computes it correctly, and how. Or, with --device, what
    a run computes on this machine's GPU, by tiny random models and against the CPU, without a network.

    Exit code 1 if there is an error. `r1 data check` checks all rows, `r1 reward test` a reward in detail.

    \b
      r1 check run.yaml
      r1 check run.yaml trainer.max_steps=100 --no-step --json
      r1 check my-model --precision bf16
      r1 check --device
    """
    share_processors()
    if len(settings) == 1 and _is_model(settings[0]):
        _check_model(settings[0], precision, as_json=as_json)
        return
    from rich.console import Console

    if device and settings:
        raise click.UsageError("--device checks the machine: give no configuration with it")
    console, found = Console(), []
    for one in _device_findings(no_step) if device else _findings(settings, no_step):
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
        click.echo(f"{errors} {'error' if errors == 1 else 'errors'}" if errors else "no errors")
    if errors:
        raise SystemExit(1)


def _findings(settings: tuple[str, ...], no_step: bool) -> "Iterator[Finding]":
    from r1_cli.plan.check.checks import PARTS, run_checks

    return run_checks(settings, [part for part in PARTS if part != "step" or not no_step])


def _device_findings(no_step: bool) -> "Iterator[Finding]":
    from r1_cli.hardware import device_name
    from r1_cli.plan.check.device import list_checks, run_device_checks

    checks = list_checks(runs=not no_step)
    click.echo(
        f"{len(checks)} checks of {device_name()}, with tiny random models, against the CPU in float64", err=True
    )
    return run_device_checks(checks)


def _is_model(word: str) -> bool:
    path = Path(word)
    return path.is_dir() or not (path.exists() or "=" in word or path.suffix in (".yaml", ".yml", ".json"))


def _check_model(path: str, precision: str, *, as_json: bool) -> None:
    from r1_cli.models.load import ModelError
    from r1_cli.plan.check.model import examine_layouts

    with user_errors(ModelError):
        answers = dict(examine_layouts(path, precision))
    if as_json:
        click.echo(json.dumps({"model": path, "precision": precision, **answers}, indent=2))
        return
    click.echo(f"{visible(path)} in {precision}, against its own eager attention on each sequence alone:")
    for question, answer in answers.items():
        click.echo(f"  {question:<17} {visible(answer)}")
