"""`r1 convert`: turn another trainer's configuration into one of r1."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from r1_cli.commands.common import Existing, user_errors

if TYPE_CHECKING:
    from r1_cli.config.convert.conversion import Conversion

ANYTHING = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(short_help="Turn another trainer's configuration into one of r1.")
def convert() -> None:
    """Print another trainer's configuration as one of r1, in YAML. Comments at the top list what has no counterpart.

    \b
      r1 convert lmm-r1 "python3 -m openrlhf.cli.train_ppo_ray --pretrain …" > mine.yaml
      r1 train mine.yaml --dry-run

    Stderr lists what r1 would refuse in the result.
    """


@convert.command("lmm-r1", context_settings=ANYTHING)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lmm_r1(command: tuple[str, ...]) -> None:
    """Convert a COMMAND of LMM-R1 or OpenRLHF 0.7: quoted, word by word after --, or a script that contains it."""
    from r1_cli.config.convert.lmm_r1 import convert_lmm_r1

    _print(lambda: convert_lmm_r1(_words(command)))


def _words(command: tuple[str, ...]) -> str:
    import shlex

    if len(command) > 1:
        return shlex.join(command)
    return _read(Path(command[0])) if len(command[0]) < 4096 and Path(command[0]).is_file() else command[0]


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is no text in UTF-8 (byte {error.start})") from error


@convert.command("verl", context_settings=ANYTHING)
@click.argument("file", type=Existing(file=True))
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
def verl(file: Path, settings: tuple[str, ...]) -> None:
    """Convert veRL's FILE, a YAML configuration or a script with Hydra overrides. Later KEY=VALUE win."""
    from r1_cli.config.convert.verl import convert_verl

    _print(lambda: convert_verl(_read(file), list(settings)))


@convert.command("trl")
@click.argument("file", type=Existing(file=True))
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that trained.")
def trl(file: Path, devices: int) -> None:
    """Convert TRL's FILE: a GRPOConfig as YAML or JSON, or the Python script that makes it, which is not executed.

    A YAML file may also have the keys of the model and the script. Of a script, the literal arguments of GRPOConfig,
    LoraConfig and GRPOTrainer are read; comments at the top list arguments that are not literal.
    """
    from r1_cli.config.convert.trl import convert_trl

    _print(lambda: convert_trl(_read(file), devices))


def _print(make: "Callable[[], Conversion]") -> None:
    from r1_cli.config import ConfigError, load_config

    with user_errors(ConfigError, ValueError):
        text = make().text()
    click.echo(text, nl=False)
    with TemporaryDirectory() as folder:
        file = Path(folder, "converted.yaml")
        file.write_text(text, "utf-8")
        try:
            load_config([str(file)])
        except ConfigError as error:
            click.echo("r1: still to be settled before it runs:", err=True)
            for problem in error.problems:
                found = problem.key if problem.value is None else f"{problem.key}={problem.value}"
                click.echo(f"  - {found}: {problem.message}", err=True)
