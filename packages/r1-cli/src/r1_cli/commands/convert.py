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
      r1 convert llamafactory qwen2_5vl_lora_sft.yaml > sft.yaml

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


@convert.command("trl", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="FILE_OR_COMMAND")
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that trained.")
@click.option(
    "--trainer",
    type=click.Choice(["grpo", "sft", "dpo", "kto", "reward"]),
    help="Of a YAML file; default: by its keys.",
)
def trl(command: tuple[str, ...], devices: int, trainer: str | None) -> None:
    """Convert a GRPOConfig, SFTConfig, DPOConfig, KTOConfig or RewardConfig of TRL.

    FILE_OR_COMMAND is YAML or JSON with its keys and those of the model and the script; a Python script, which is not
    executed, of which the literal arguments of the configuration, LoraConfig and the trainer are read; or a command
    such as `trl sft --model_name_or_path …`, quoted, or a shell script that contains it.
    """
    from r1_cli.config.convert.trl import convert_trl

    _print(lambda: convert_trl(_words(_found(command)), devices, trainer))


@convert.command("llamafactory", context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="FILE_OR_COMMAND")
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that trained.")
def llamafactory(command: tuple[str, ...], devices: int) -> None:
    """Convert a configuration of LLaMA-Factory for the stages sft, dpo and kto.

    FILE_OR_COMMAND is its YAML file, a command such as `llamafactory-cli train sft.yaml`, quoted, or a shell script
    that contains it. Rows are those of `dataset_info.json` in its dataset_dir.
    """
    from r1_cli.config.convert.llamafactory import convert_llamafactory

    command = _found(command)
    folder = Path(command[0]).parent if len(command) == 1 and len(command[0]) < 4096 else Path()
    _print(lambda: convert_llamafactory(_words(command), devices, folder))


def _found(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command. Raises UsageError if it is the name of no file."""
    if len(command) == 1 and len(command[0].split()) == 1 and not Path(command[0]).is_file():
        raise click.UsageError(f"{command[0]}: no such file")
    return command


def _print(make: "Callable[[], Conversion]") -> None:
    from r1_cli.config import ConfigError, load_config

    with user_errors(ConfigError, ValueError):
        text = make().text()
    click.echo(text, nl=False)
    with TemporaryDirectory() as folder:
        file = Path(folder, "converted.yaml")
        file.write_text(text, "utf-8")
        try:
            load_config([str(file)], command=None)
        except ConfigError as error:
            click.echo("r1: still to be settled before it runs:", err=True)
            for problem in error.problems:
                found = problem.key if problem.value is None else f"{problem.key}={problem.value}"
                click.echo(f"  - {found}: {problem.message}", err=True)
