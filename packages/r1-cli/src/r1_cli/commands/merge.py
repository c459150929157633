"""`r1 merge`: from a checkpoint to a Hugging Face folder."""

from pathlib import Path

import click

from r1_cli.commands.errors import Existing, user_errors, writing


@click.command(short_help="Write a checkpoint as a Hugging Face folder.")
@click.argument("checkpoint", type=Existing(folder=True))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write; by default actor/huggingface inside the checkpoint.",
)
def merge(checkpoint: Path, output: Path | None) -> None:
    """Write a checkpoint as a Hugging Face folder: weights, tokenizer, processor and generation settings.

    Of r1, or of EasyR1 or veRL with FSDP shards (model_world_size_*_rank_*.pt), which are read without executing them.

    \b
      r1 merge checkpoints/easy_r1/demo/global_step_60 --output my-model
    """
    from r1_cli.jobs.merge import merge as write_folder
    from r1_cli.models.adapters import AdapterError
    from r1_cli.models.load import ModelError
    from r1_cli.models.sharded import ShardError

    with user_errors(ModelError, ShardError, AdapterError, FileExistsError), writing(output or checkpoint):
        click.echo(write_folder(checkpoint, output))
