"""`r1 merge`: write a checkpoint as a Hugging Face folder. The models that commands name."""

import shlex
from pathlib import Path

import click

from r1_cli.commands.common import Existing, UserError, user_errors, writing


def model_path(model: str) -> str:
    """Return the folder with the model of a checkpoint, or `model` itself. Raises UserError if it is missing."""
    from r1_cli.config.files import find_model_folder, names_folder, where_or_near

    if not Path(model).is_dir() and (names_folder(model) or (Path(model).parent.is_dir() and "/" in model)):
        raise UserError(f"{model}: no such folder{where_or_near(model)}")
    return find_model_folder(model)


def chosen_checkpoint(model: str) -> str:
    """Return the best checkpoint in validation, or else the last, of a run's folder; or `model` itself."""
    from r1_cli.checkpoint.folders import CheckpointStore

    store = CheckpointStore(Path(model))
    if not store.steps() or (store.root / "config.json").is_file():
        return model
    best = store.best()
    return str(store.latest() if best is None else store.path(best))


def own_configuration(model: str, settings: tuple[str, ...]) -> list[str]:
    """Return the words for the configuration of a checkpoint's run, or of the run whose configuration is named."""
    from r1_cli.config.load import split_words
    from r1_cli.runs.reader import CONFIG_FILE, RunReader, run_of
    from r1_cli.runs.templates import override_words

    run, (named, _) = run_of(Path(model)), split_words(settings)
    if named is not None:
        run = Path(named).parent if Path(named).name == CONFIG_FILE else None
    if run is None:
        return []
    try:
        words = override_words(run, RunReader(run).settings())
    except ValueError:  # it is damaged: reading it as a configuration says how
        words = []
    return words if named is not None else [f"config={run / CONFIG_FILE}", *words]


@click.command(short_help="Write a checkpoint as a Hugging Face folder.")
@click.argument("checkpoint", type=Existing(folder=True))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write; by default actor/huggingface inside the checkpoint.",
)
@click.option("--push", metavar="NAME/MODEL", help="Upload the folder to the Hugging Face hub, too, as private.")
@click.option("--public", is_flag=True, help="With --push: as public.")
def merge(checkpoint: Path, output: Path | None, push: str | None, public: bool) -> None:
    """Write a checkpoint as a Hugging Face folder: weights, tokenizer, processor, generation settings, model card.

    Reads checkpoints of r1, and of EasyR1 and veRL with FSDP shards (model_world_size_*_rank_*.pt), without executing
    anything in them. Of a run's folder, it takes the best checkpoint in validation, or else the last. The card says
    data, rewards, algorithm, validation and versions, from the run's record; a card that you have edited stays.

    --push takes the token of HF_TOKEN or of `hf auth login`, and writes it nowhere:

    \b
      r1 merge checkpoints/easy_r1/demo/global_step_60 --output my-model
      r1 merge checkpoints/easy_r1/demo --output my-model --push me/my-model
    """
    from r1_cli.jobs.hub import HubError, push_folder
    from r1_cli.jobs.merge import merge as write_folder
    from r1_cli.jobs.next_steps import next_commands
    from r1_cli.models.adapters import AdapterError
    from r1_cli.models.load import ModelError
    from r1_cli.models.verl_shards import ShardError

    if public and not push:
        raise click.UsageError("--public takes --push NAME/MODEL")
    chosen = Path(chosen_checkpoint(str(checkpoint)))
    if chosen != checkpoint:
        click.echo(f"merging {chosen}", err=True)
    with user_errors(ModelError, ShardError, AdapterError, FileExistsError), writing(output or chosen):
        folder = write_folder(chosen, output)
    click.echo(folder)
    if push:
        size = sum(file.stat().st_size for file in folder.iterdir())
        click.echo(
            f"uploading {size / 1e6:,.1f} MB to {push}, {'public' if public else 'private'} if it is new", err=True
        )
        with user_errors(HubError):
            address, notes = push_folder(folder, push, public=public)
        for note in notes:
            click.echo(f"note: {note}", err=True)
        click.echo(address)
    for line in next_commands([f"chat {shlex.quote(str(folder))}"]):
        click.echo(line, err=True)
