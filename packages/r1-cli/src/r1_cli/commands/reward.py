"""`r1 reward`: what an author of a reward needs before a run does."""

import shlex
from typing import Any

import click
from click.core import ParameterSource

from r1_cli.commands.errors import ANY_WORDS, user_errors, visible

NAMED = 3  # failed checks


@click.group(short_help="Try a reward before training with it.")
def reward() -> None:
    """Try a reward before training with it."""


@reward.command(context_settings=ANY_WORDS)
@click.argument("spec", metavar="REWARD")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
@click.option("--data", metavar="FILE", help="Rows to ask about, as in data.train_files; by default four sums.")
@click.option("--prompt-key", metavar="COLUMN", help="The column of the prompts.")
@click.option("--answer-key", metavar="COLUMN", help="The column of the ground truths.")
@click.option("--samples", type=click.IntRange(min=1), default=32, show_default=True, help="Rows to take.")
@click.option("--timeout", type=click.FloatRange(min=0.01), default=10.0, show_default=True, help="Seconds per answer.")
def test(
    spec: str,
    settings: tuple[str, ...],
    data: str | None,
    prompt_key: str | None,
    answer_key: str | None,
    samples: int,
    timeout: float,
) -> None:
    """Try a REWARD, a built-in name or file.py:function, on right, wrong and hostile answers.

    KEY=VALUE are the function's keywords, as in worker.reward.reward_function_kwargs. Exit code 1 if a check fails:

    \b
      r1 reward test reward.py:compute_score format_weight=0.2 --data train.parquet
      r1 reward test math
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from r1_cli.config import ConfigError
    from r1_cli.plan.check.try_reward import try_reward
    from r1_data.formats import Columns
    from r1_data.types import DataError
    from r1_rewards.errors import RewardSpecError

    columns = Columns(prompt_key or "prompt", answer_key or "answer") if prompt_key or answer_key else None
    marks = {True: "[green]ok[/]", False: "[red]FAILS[/]", None: ""}
    table = Table("check", "result", "", title=f"r1 reward test {escape(spec)}", title_justify="left")
    passed, failed = 0, list[str]()
    with user_errors(ConfigError, DataError, RewardSpecError):
        kwargs = _keywords(settings)
        for finding in try_reward(spec, kwargs, data=data, columns=columns, samples=samples, timeout=timeout):
            table.add_row(escape(finding.check), escape(visible(finding.result)), marks[finding.passed])
            passed += finding.passed is True
            failed += [finding.check] if finding.passed is False else []
    Console().print(table)
    if not failed:
        click.echo(f"{passed} checks passed")
        return
    told = ", ".join(failed[:NAMED]) + (", …" if len(failed) > NAMED else "")
    click.echo(f"{len(failed)} of {passed + len(failed)} checks failed: {told}")
    click.echo(f"correct the reward, then: {_same_command()}")
    raise SystemExit(1)


def _same_command() -> str:
    """Return the command that runs now, as it is typed again."""
    context = click.get_current_context()
    words = ["r1", "reward", "test", context.params["spec"], *context.params["settings"]]
    for option in context.command.params:
        if (
            context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
            and option.opts[0][:2] == "--"
        ):
            words += [option.opts[0], str(context.params[option.name or ""])]
    return shlex.join(words)


def _keywords(settings: tuple[str, ...]) -> dict[str, Any]:
    """Return KEY=VALUE words as keywords; a dot in a key, or a mapping as value, makes a mapping."""
    from r1_cli.config.settings import read_words

    keywords: dict[str, Any] = {}
    for setting in read_words(settings):
        *path, name = setting.key.split(".")
        inner = keywords
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = setting.value
    return keywords
