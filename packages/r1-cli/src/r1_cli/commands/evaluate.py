"""`r1 eval`: evaluate a model, grade stored answers again, and compare stored evaluations."""

import json
from pathlib import Path

import click

from r1_cli.commands.common import (
    ANY_WORDS,
    Existing,
    UserError,
    endpoint_options,
    share_processors,
    user_errors,
    writing,
)
from r1_cli.commands.models import chosen_checkpoint, model_path, own_configuration


@click.command(name="eval", short_help="Score a model on the validation rows.", context_settings=ANY_WORDS)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--suite", "suites", metavar="A,B", help="Benchmarks: SUITE[:SUBSET][/PROMPT] or ./mine.yaml.")
@click.option("--prompt", metavar="NAME", help="Of the suites; by default the first of each.")
@click.option("--data-root", type=Existing(folder=True), help="Folder with the rows of suites, instead of the hub.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Keep the answers in this folder.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here too.")
@click.option("--n", type=click.IntRange(min=1), help="Answers a row.")
@click.option("--partial", is_flag=True, help="Print figures with bounds if over 1 % of the answers are missing.")
@click.option("--compare", is_flag=True, help="Compare the folders of two or more evaluations, paired by rows.")
@click.option("--regrade", is_flag=True, help="Grade the answers of a folder again; --output then gets a copy.")
@click.option("--watch", is_flag=True, help="Evaluate each checkpoint of a run when it appears, until the run ends.")
@click.option("--guard", "guards", metavar="A,B", help="Of --watch: suites, each compared with the start model.")
@click.option("--start", metavar="MODEL", help="Of --guard: compare with this; default: what the run began with.")
@click.option("--grader", metavar="REWARD", help="Of --regrade: FILE:FUNCTION or a name; default: the same.")
@click.option("--grader-option", "grader_options", multiple=True, metavar="KEY=VALUE", help="Keyword of --grader.")
@endpoint_options
def evaluate(
    model: str,
    settings: tuple[str, ...],
    suites: str | None,
    prompt: str | None,
    data_root: Path | None,
    output: Path | None,
    json_path: Path | None,
    n: int | None,
    partial: bool,
    compare: bool,
    regrade: bool,
    watch: bool,
    guards: str | None,
    start: str | None,
    grader: str | None,
    grader_options: tuple[str, ...],
    served_name: str | None,
    api_key_env: str,
    concurrency: int,
    timeout: float,
) -> None:
    """Score a MODEL on the validation rows of a configuration: accuracy, avg@n, pass@k, maj@n, with 95 % intervals.

    It is a checkpoint, a run's folder (its best checkpoint), a Hugging Face folder, a hub name, or the address of an
    OpenAI-compatible server. A checkpoint is scored with its run's own configuration, unless you name another. With
    --output, the same command resumes after a kill. A suite brings its rows, prompt, grader and sampling.

    \b
      r1 eval checkpoints/easy_r1/demo/global_step_60
      r1 eval my-model examples/quickstart/config.yaml --n 16 --output a
      r1 eval my-model --suite math500,gsm8k --output c
      r1 eval http://localhost:8000/v1 config.yaml --served-name other --output b
      r1 eval --compare a b
      r1 eval --regrade a --grader math
      r1 eval --watch checkpoints/easy_r1/demo --suite math500 --guard gsm8k
    """
    if (grader or grader_options) and not regrade:
        raise click.UsageError("--grader and --grader-option need --regrade")
    if (guards or start) and not (watch and guards):
        raise click.UsageError("--guard needs --watch, and --start needs --guard")
    if compare + regrade + watch > 1:
        raise click.UsageError("--compare, --regrade and --watch exclude one another")
    if compare:
        _compare([model, *settings], json_path, partial=partial)
    elif regrade:
        _regrade([model, *settings], grader, grader_options, output, json_path, partial=partial)
    elif watch:
        if json_path or served_name:
            raise click.UsageError("--watch takes no --json and no --served-name; its figures are in the run's folder")
        from r1_cli.commands.watch import WatchWords, watch_run

        named = (suites.split(",") if suites else [], guards.split(",") if guards else [], prompt, data_root)
        watch_run(WatchWords(Path(model), settings, *named, start, output, n, partial))
    else:
        server = (served_name, api_key_env, concurrency, timeout)
        chosen = (suites.split(",") if suites else [], prompt, data_root)
        _evaluate(model, settings, chosen, output, json_path, n, server, partial=partial)


def _evaluate(
    model: str,
    settings: tuple[str, ...],
    chosen: tuple[list[str], str | None, Path | None],
    output: Path | None,
    json_path: Path | None,
    n: int | None,
    server: tuple[str | None, str, int, float],
    *,
    partial: bool,
) -> None:
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError
    from r1_rewards.types import RewardSpecError

    served_name, key_variable, concurrency, timeout = server
    address = model.startswith(("http://", "https://"))
    for option, value in (("--served-name", served_name), ("--output", output)):
        if address and not value:
            raise UserError(f"{option} is missing: an endpoint's model needs its name, and its answers a folder")
    words = [*settings]
    if not address:
        path = model_path(model := chosen_checkpoint(model))
        own = [] if chosen[0] else own_configuration(model, settings)
        words = [*own, *settings, f"worker.actor.model.model_path={path}"]
    words += [] if n is None else [f"worker.rollout.val_override_config.n={n}"]
    with user_errors(ConfigError, DataError, RewardSpecError, ValueError):
        if chosen[0]:
            from r1_cli.build.suites import load_with_suites
            from r1_cli.config.suites import published_figures

            config, published = load_with_suites(words, *chosen), published_figures(*chosen[:2])
        else:
            (config, _), published = load_config(words, command="eval"), []

        share_processors()
        from r1_cli.build.endpoint import open_endpoint
        from r1_cli.jobs.evaluate import EvalOptions, evaluate_model
        from r1_cli.models.load import ModelError
        from r1_rewards.types import RewardFailure
        from r1_rollout.errors import RolloutError

        with user_errors(ModelError, RewardSpecError, RewardFailure, RolloutError), writing(json_path or output):
            endpoint = open_endpoint(model, key_variable, concurrency, timeout) if address else None
            options = EvalOptions(
                json_path, output, partial, endpoint, served_name or "", published, apart=len(chosen[0]) > 1
            )
            evaluate_model(served_name or model, config, options)


def _compare(folders: list[str], json_path: Path | None, *, partial: bool) -> None:
    from r1_cli.config import ConfigError
    from r1_cli.runs.evaluation.compare import compare, format_comparisons, to_json
    from r1_cli.runs.evaluation.stored import EvaluationError, read_evaluation

    if len(folders) < 2:
        raise click.UsageError("--compare takes two or more folders")
    with user_errors(ConfigError, EvaluationError):
        evaluations = [read_evaluation(Path(folder)) for folder in folders]
        found = compare(evaluations, partial=partial)
    for line in format_comparisons(evaluations, found):
        click.echo(line)
    if json_path:
        with writing(json_path):
            json_path.write_text(json.dumps(to_json(evaluations, found), indent=2) + "\n", encoding="utf-8")


def _regrade(
    folders: list[str],
    grader: str | None,
    grader_options: tuple[str, ...],
    output: Path | None,
    json_path: Path | None,
    *,
    partial: bool,
) -> None:
    from r1_cli.commands.rewards import read_keywords
    from r1_cli.config import ConfigError
    from r1_data.types import DataError
    from r1_rewards.types import RewardFailure, RewardSpecError

    if len(folders) != 1:
        raise click.UsageError("--regrade takes one folder")
    share_processors()
    from r1_cli.jobs.evaluate import EvalOptions
    from r1_cli.jobs.regrade import Grader, regrade
    from r1_cli.runs.evaluation.stored import EvaluationError
    from r1_cli.runs.rows.choose import ChoiceError

    other = Grader(grader, read_keywords(grader_options)) if grader else None
    errors = (ConfigError, DataError, RewardSpecError, RewardFailure, ChoiceError, EvaluationError)
    with user_errors(*errors), writing(output or json_path):
        regrade(Path(folders[0]), other, EvalOptions(json_path, output, partial))
