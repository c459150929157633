"""`r1 sample` and `r1 rows`: sample answers to rows, and choose rows of training from them."""

from pathlib import Path
from typing import Literal

import click

from r1_cli.commands.common import (
    ANY_WORDS,
    Existing,
    FiniteRange,
    UserError,
    endpoint_options,
    share_processors,
    user_errors,
    writing,
)
from r1_cli.commands.models import model_path


@click.command(short_help="Sample and score answers to the training rows.", context_settings=ANY_WORDS)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write.")
@click.option("--n", type=click.IntRange(min=1), help="Answers a row; by default worker.rollout.n.")
@click.option("--shard", metavar="I/N", default="1/1", help="Sample the I-th of N parts of the rows.")
@click.option("--limit", type=click.IntRange(min=1), help="Sample the first so many rows only.")
@click.option("--block", type=click.IntRange(1, 1000), help="Rows of one call of the engine and one file.")
@endpoint_options
def sample(
    model: str,
    settings: tuple[str, ...],
    output: Path,
    n: int | None,
    shard: str,
    limit: int | None,
    block: int | None,
    served_name: str | None,
    api_key_env: str,
    concurrency: int,
    timeout: float,
) -> None:
    """Sample answers of MODEL to the training rows of a configuration, and score them with its reward.

    MODEL is a Hugging Face folder, a hub name or a checkpoint. Run the same command again and it resumes; answers that
    are in the folder are not sampled again. Shards may run at the same time and share the folder. MODEL may also be the
    address of an OpenAI-compatible server:

    \b
      r1 sample my-model examples/quickstart/config.yaml --n 16 --output samples
      r1 sample my-model config.yaml --output samples --shard 3/8
      r1 sample http://localhost:8000/v1 config.yaml --served-name teacher --output samples
      r1 view samples
    """
    from r1_cli.config import ConfigError, load_config
    from r1_cli.runs.rows.parts import RowShard
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    with user_errors(ConfigError, DataError, RewardSpecError, ValueError):
        part = RowShard.parse(shard)
        address = model.startswith(("http://", "https://"))
        if address and not served_name:
            raise UserError("--served-name is missing: the name of the model at the endpoint")
        more = [] if address else [f"worker.actor.model.model_path={model_path(model)}"]
        more += [] if n is None else [f"worker.rollout.n={n}"]
        config, _ = load_config([*settings, *more], command="sample")

        share_processors()
        from r1_cli.build.endpoint import open_endpoint
        from r1_cli.jobs.sample import SampleOptions, sample_rows
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure
        from r1_rollout.errors import RolloutError

        with user_errors(ModelError, RewardSpecError, RewardFailure, RolloutError), writing(output):
            server = open_endpoint(model, api_key_env, concurrency, timeout) if address else None
            options = SampleOptions(output, part, limit, block, server, served_name or "")
            sample_rows(config, options)


@click.command(short_help="Choose rows of training from sampled answers.")
@click.argument("folders", nargs=-1, required=True, type=Existing(folder=True), metavar="FOLDER...")
@click.option("--as", "kind", required=True, type=click.Choice(["sft", "pairs", "rates"]), help="What to write.")
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help=".parquet or .jsonl.")
@click.option(
    "--keep",
    type=click.Choice(["best", "all", "shortest", "random"]),
    default="best",
    show_default=True,
    help="Which right answers.",
)
@click.option("--per-row", type=click.IntRange(min=1), help="Answers or pairs a row; default 1, with --keep all any.")
@click.option("--band", metavar="LOW:HIGH", help="Only rows with these pass rates.")
@click.option(
    "--min-score", type=FiniteRange(), help="Score from which an answer is right; default: accuracy above 0.5."
)
@click.option("--margin", type=FiniteRange(min=0), default=0.0, help="Least difference of a pair's scores.")
@click.option("--keep-cut", is_flag=True, help="Choose answers, too, that the limit of tokens cut.")
@click.option("--few", is_flag=True, help="Accept that over 95 % of the rows are dropped.")
@click.option("--control", is_flag=True, help="Write as many rows by lot beside, to compare with.")
@click.option("--seed", type=int, default=0, help="Of what is chosen by lot.")
@click.option("--rescore", metavar="REWARD", help="Score the answers by this reward: FILE:FUNCTION or a name.")
@click.option("--reward-option", "reward_options", multiple=True, metavar="KEY=VALUE", help="Keyword of --rescore.")
def rows(
    folders: tuple[Path, ...],
    kind: Literal["sft", "pairs", "rates"],
    output: Path,
    keep: Literal["best", "all", "shortest", "random"],
    per_row: int | None,
    band: str | None,
    min_score: float | None,
    margin: float,
    keep_cut: bool,
    few: bool,
    control: bool,
    seed: int,
    rescore: str | None,
    reward_options: tuple[str, ...],
) -> None:
    """Choose rows of training from the answers in folders of `r1 sample`, without sampling anything.

    sft: prompts with right answers, as messages. pairs: a better and a worse answer. rates: the rows themselves with
    their pass rates. A text is used once a row:

    \b
      r1 rows samples --as sft --keep shortest --band 0.1:0.9 --control --output cold.parquet
      r1 rows samples --as pairs --margin 0.5 --output pairs.parquet
      r1 rows samples --as rates --rescore reward.py:compute_score --output rates.parquet
    """
    from r1_cli.commands.rewards import read_keywords
    from r1_cli.config import ConfigError
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    share_processors()
    from r1_cli.jobs.rows import RowsOptions, write_chosen
    from r1_cli.runs.rows.choose import Choice, ChoiceError, parse_band

    with user_errors(ConfigError, DataError, RewardSpecError, ChoiceError), writing(output):
        choice = Choice(kind, keep, per_row, parse_band(band), margin, keep_cut, few, seed)
        options = RowsOptions(output, min_score, control, rescore, read_keywords(reward_options))
        write_chosen(folders, choice, options)
