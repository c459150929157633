"""`r1 reward test` and `r1 score-a`: try a reward, or add base scores to the training rows."""

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from r1_cli.commands.common import ANY_WORDS, FiniteRange, share_processors, user_errors, visible

NAMED = 3  # failed checks


@click.group(short_help="Test a reward before training with it.")
def reward() -> None:
    """Test a reward before training with it."""


@reward.command(context_settings=ANY_WORDS)
@click.argument("spec", metavar="REWARD")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...")
@click.option("--data", metavar="FILE", help="Rows to test with, as in data.train_files; by default four sums.")
@click.option("--prompt-key", metavar="COLUMN", help="The column of the prompts.")
@click.option("--answer-key", metavar="COLUMN", help="The column of the ground truths.")
@click.option("--samples", type=click.IntRange(min=1), default=32, show_default=True, help="Number of rows.")
@click.option("--timeout", type=FiniteRange(min=0.01), default=10.0, show_default=True, help="Seconds per answer.")
def test(
    spec: str,
    settings: tuple[str, ...],
    data: str | None,
    prompt_key: str | None,
    answer_key: str | None,
    samples: int,
    timeout: float,
) -> None:
    """Test a REWARD, a built-in name or file.py:function, on correct, wrong and hostile answers.

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
    from r1_rewards.types import RewardSpecError

    columns = Columns(prompt_key or "prompt", answer_key or "answer") if prompt_key or answer_key else None
    marks = {True: "[green]ok[/]", False: "[red]FAILS[/]", None: ""}
    table = Table("check", "result", "", title=f"r1 reward test {escape(spec)}", title_justify="left")
    passed, failed = 0, list[str]()
    with user_errors(ConfigError, DataError, RewardSpecError):
        kwargs = read_keywords(settings)
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
    context = click.get_current_context()
    words = ["r1", "reward", "test", context.params["spec"], *context.params["settings"]]
    for option in context.command.params:
        if (
            context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
            and option.opts[0][:2] == "--"
        ):
            words += [option.opts[0], str(context.params[option.name or ""])]
    return shlex.join(words)


def read_keywords(settings: tuple[str, ...]) -> dict[str, Any]:
    from r1_cli.config.settings import read_words

    keywords: dict[str, Any] = {}
    for setting in read_words(settings):
        *path, name = setting.key.split(".")
        inner = keywords
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = setting.value
    return keywords


@click.command(name="score-a", short_help="Add RLPR's base scores to the training rows.", context_settings=ANY_WORDS)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option(
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The rows with their scores, .parquet or .jsonl.",
)
def score_a(settings: tuple[str, ...], output: Path) -> None:
    """Write the training rows of a configuration with a column scoreA, which `reference_probability` subtracts.

    The scores come from the model that a run of this configuration would start with, at its temperature; scoreA_terms
    records both, and a run checks them. Run an interrupted command again and it continues:

    \b
      r1 score-a examples/rlpr/text.yaml --output train.parquet
      r1 train examples/rlpr/text.yaml data.train_files=train.parquet
    """
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError):
        config, _ = load_config(settings, command="data")

        share_processors()
        from r1_cli.jobs.score_a import write_scores
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure

        with user_errors(ModelError, RewardFailure):
            write_scores(config, output)
