"""`r1 score-a`: how probable a model finds the reference answers before any reasoning, as a column of the rows."""

from pathlib import Path

import click

from r1_cli.commands.errors import ANY_WORDS, user_errors
from r1_cli.commands.threads import share_processors


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

    The model is the one that a run of this configuration would begin with, at its temperature; scoreA_terms says so,
    and a run checks it. A command that was interrupted goes on where it was:

    \b
      r1 score-a examples/rlpr/text.yaml --output train.parquet
      r1 train examples/rlpr/text.yaml data.train_files=train.parquet
    """
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError
    from r1_rewards.errors import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError):
        config, _ = load_config(settings, command="data")

        share_processors()
        from r1_cli.jobs.score_a import write_scores
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure

        with user_errors(ModelError, RewardFailure):
            write_scores(config, output)
