"""`r1 sample` and `r1 rows`: sample answers to rows, and choose rows of training from them."""

from pathlib import Path

import click

from r1_cli.commands.common import ANY_WORDS, share_processors, user_errors, writing
from r1_cli.commands.models import model_path


@click.command(short_help="Sample and score answers to the training rows.", context_settings=ANY_WORDS)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write.")
@click.option("--n", type=click.IntRange(min=1), help="Answers a row; by default worker.rollout.n.")
@click.option("--shard", metavar="I/N", default="1/1", help="Sample the I-th of N parts of the rows.")
@click.option("--limit", type=click.IntRange(min=1), help="Sample the first so many rows only.")
@click.option("--block", type=click.IntRange(1, 1000), help="Rows of one call of the engine and one file.")
def sample(
    model: str,
    settings: tuple[str, ...],
    output: Path,
    n: int | None,
    shard: str,
    limit: int | None,
    block: int | None,
) -> None:
    """Sample answers of MODEL to the training rows of a configuration, and score them with its reward.

    MODEL is a Hugging Face folder, a hub name or a checkpoint. Run the same command again and it resumes; answers that
    are in the folder are not sampled again. Shards may run at the same time and share the folder:

    \b
      r1 sample my-model examples/quickstart/config.yaml --n 16 --output samples
      r1 sample my-model config.yaml --output samples --shard 3/8
      r1 view samples
    """
    from r1_cli.config import ConfigError, load_config
    from r1_cli.runs.rows.parts import RowShard
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError, ValueError):
        part = RowShard.parse(shard)
        more = [f"worker.actor.model.model_path={model_path(model)}"]
        more += [] if n is None else [f"worker.rollout.n={n}"]
        config, _ = load_config([*settings, *more], command="sample")

        share_processors()
        from r1_cli.jobs.sample import SampleOptions, sample_rows
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure
        from r1_rollout.errors import RolloutError

        with user_errors(ModelError, RewardSpecError, RewardFailure, RolloutError), writing(output):
            sample_rows(model, config, SampleOptions(output, part, limit, block))
