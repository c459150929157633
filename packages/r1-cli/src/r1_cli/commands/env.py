"""`r1 env test` and `r1 env play`: try tools or an environment without a model."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from r1_cli.commands.common import ANY_WORDS, FiniteRange, UserError, user_errors, visible

if TYPE_CHECKING:
    from r1_rewards.environments.types import EnvironmentSetup

NAMED = 3  # failed checks
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(short_help="Test an environment or tools, or play one by hand.")
def env() -> None:
    """Test an environment or tools without a model, or play an episode by hand."""


def _shared(command: Command) -> Command:
    for decorate in (
        click.option(
            "--timeout", type=FiniteRange(min=0.01), default=10.0, show_default=True, help="Seconds per call."
        ),
        click.option("--row", metavar="JSON", help='A row with its columns, as {"answer": "5"}.'),
        click.option("--data", metavar="FILE", help="Rows, as in data.train_files; by default four sums."),
        click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]..."),
        click.argument("spec", metavar="ENVIRONMENT"),
    ):
        command = decorate(command)
    return command


@env.command(context_settings=ANY_WORDS)
@_shared
@click.option("--episodes", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--turns", type=click.IntRange(min=1), default=6, show_default=True, help="Turns of an episode, at most.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Processes that compute at a time."
)
def test(
    spec: str, settings: tuple[str, ...], data: str | None, row: str | None, timeout: float,
    episodes: int, turns: int, workers: int,
) -> None:  # fmt: skip
    """Play episodes with scripted, random and hostile turns, and report what goes wrong.

    ENVIRONMENT is FILE.py:CLASS, a tool FILE.py:FUNCTION, all functions of FILE.py, or a built-in tool. KEY=VALUE are
    the keywords of the class, or of the tool. Exit code 1 if a check fails:

    \b
      r1 env test guess.py:Guess
      r1 env test tools.py --data train.parquet
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from r1_cli.plan.check.try_environment import try_environment
    from r1_data.types import DataError
    from r1_rewards.environments.types import EnvironmentSpecError

    marks = {True: "[green]ok[/]", False: "[red]FAILS[/]", None: ""}
    table = Table("check", "result", "", title=f"r1 env test {escape(spec)}", title_justify="left")
    failed = list[str]()
    with user_errors(EnvironmentSpecError, DataError):
        setup, rows = _setup(spec, settings, timeout), _rows(data, row)
        for finding in try_environment(setup, rows, episodes=episodes, turns=turns, workers=workers):
            table.add_row(escape(finding.check), escape(visible(finding.result)), marks[finding.passed])
            failed += [finding.check] if finding.passed is False else []
    Console().print(table)
    if failed:
        told = ", ".join(failed[:NAMED]) + (", …" if len(failed) > NAMED else "")
        click.echo(f"{len(failed)} checks failed: {told}")
        raise SystemExit(1)


@env.command(name="play", context_settings=ANY_WORDS)
@_shared
def play(spec: str, settings: tuple[str, ...], data: str | None, row: str | None, timeout: float) -> None:
    """Play one episode: type the policy's turns, a line each; an empty input (Ctrl-D) ends it.

    With tools, a turn is a call:

    \b
      r1 env play guess.py:Guess --row '{"answer": "5"}'
      r1 env play calculator
        calculator {"expression": "6 * 7"}
    """
    from r1_cli.jobs.play_environment import play_by_hand
    from r1_data.types import DataError
    from r1_rewards.environments.types import EnvironmentSpecError

    def read() -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None

    with user_errors(EnvironmentSpecError, DataError):
        columns, pictures = _rows(data, row)[0]
        play_by_hand(
            _setup(spec, settings, timeout), columns, pictures, read=read, write=lambda line: click.echo(visible(line))
        )


def _setup(spec: str, settings: tuple[str, ...], timeout: float) -> "EnvironmentSetup":
    from r1_cli.commands.rewards import read_keywords
    from r1_cli.config import ConfigError
    from r1_rewards.environments.shapes import is_environment
    from r1_rewards.environments.types import EnvironmentSetup

    with user_errors(ConfigError):
        kwargs = read_keywords(settings)
    if is_environment(spec):
        return EnvironmentSetup(environment=spec, environment_kwargs=kwargs, tool_timeout=timeout)
    name = spec.rpartition(":")[2]
    return EnvironmentSetup(tools=[spec], tool_kwargs={name: kwargs} if kwargs else {}, tool_timeout=timeout)


def _rows(data: str | None, row: str | None) -> list[tuple[dict[str, object], list[object]]]:
    """Return rows with their pictures: `row`, those of the file `data`, or four sums with a picture of stripes."""
    from r1_cli.plan.check.environment_turns import example_rows

    if row is not None:
        try:
            columns = json.loads(row)
        except json.JSONDecodeError as error:
            raise UserError(f"--row is no JSON: {error}") from error
        if not isinstance(columns, dict):
            raise UserError(f'--row must be an object, as {{"answer": "5"}}, got {row}')
        return [(columns, example_rows()[0][1])]
    if data is None:
        return example_rows()
    from r1_cli.plan.check.try_reward import read_questions

    return [
        ({"answer": item.ground_truth, "ground_truth": item.ground_truth, **item.metadata}, list(item.images))
        for item in read_questions(data, None, 32)
    ]
