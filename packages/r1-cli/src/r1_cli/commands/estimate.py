"""`r1 estimate`: estimate memory and time of a run, for devices here or elsewhere."""

import json

import click

from r1_cli.commands.common import ANY_WORDS, FiniteRange, user_errors

SHARE = FiniteRange(min=0, max=1, min_open=True)
TOKENS = click.IntRange(min=1)


@click.command(
    short_help="Estimate memory and time of a run by phase, for GPUs here or not.", context_settings=ANY_WORDS
)
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--gpus", metavar="[NODESx]NUMBERxNAME[-MEMORY]", help="GPUs, such as 8xH100-80GB; default: CPU.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--prompt-tokens", type=TOKENS, help="Tokens of a prompt, for times; default: data.max_prompt_length.")
@click.option("--answer-tokens", type=TOKENS, help="Tokens of an answer, for times; default: data.max_response_length.")
@click.option("--learning-efficiency", type=SHARE, default=0.4, show_default=True, help="Share of the GPUs' peak.")
@click.option("--sampling-efficiency", type=SHARE, default=0.5, show_default=True, help="Share of memory's bandwidth.")
def estimate(
    settings: tuple[str, ...],
    gpus: str | None,
    as_json: bool,
    prompt_tokens: int | None,
    answer_tokens: int | None,
    learning_efficiency: float,
    sampling_efficiency: float,
) -> None:
    """Estimate memory and time of each phase of a step. Exit code 1 if the run does not fit.

    The model's config.json is enough, in a folder or in the cache of the Hugging Face hub. --gpus wins over
    trainer.nnodes and trainer.n_gpus_per_node.

    \b
      r1 estimate run.yaml --gpus 8xH100-80GB
      r1 estimate run.yaml worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct --gpus 2x8xA100-80GB
    """
    from r1_cli.config import ConfigError, load_config
    from r1_cli.config.fine_tuning import as_training
    from r1_cli.plan.estimate.cards import CardError, read_cards

    with user_errors(ConfigError, CardError):
        cards = read_cards(gpus) if gpus is not None else None
        devices = [f"trainer.nnodes={cards.nodes}", f"trainer.n_gpus_per_node={cards.of_node}"] if cards else []
        config, provenance = load_config([*settings, *devices], command=None)
        if provenance.is_set("sft"):
            config = as_training(config)

    from r1_cli.plan.estimate.estimate import estimate_run
    from r1_cli.plan.estimate.models import find_models
    from r1_cli.plan.estimate.times import Assumptions

    assumed = Assumptions(learning_efficiency, sampling_efficiency, prompt_tokens, answer_tokens)
    with user_errors(ValueError):
        models, notes = find_models(config)
        found = estimate_run(config, models, cards, assumed)
    found.notes.extend(notes)
    if provenance.is_set("sft") and config.samples:
        found.notes.append("r1 sft samples in validation only")
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        from rich.console import Console

        from r1_cli.plan.estimate.show import show

        show(Console(), found)
    if not found.fits:
        raise SystemExit(1)
