"""`r1 chat`: talk to a model in the terminal."""

import shlex
import sys
from pathlib import Path

import click

from r1_cli.commands.common import ANY_WORDS, FiniteRange, UserError, share_processors, user_errors
from r1_cli.commands.models import chosen_checkpoint, model_path, own_configuration


@click.command(short_help="Talk to a model in the terminal.", context_settings=ANY_WORDS)
@click.argument("model")
@click.argument("settings", nargs=-1, type=click.UNPROCESSED, metavar="[CONFIG.yaml] [KEY=VALUE]...")
@click.option("--image", "images", multiple=True, metavar="PATH", help="A picture for the first question; repeatable.")
@click.option("--temperature", type=FiniteRange(min=0), help="0: greedy; by default as the run validates.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of an answer; by default data.max_response_length.")
@click.option("--seed", type=int, help="Of the sampling; by default worker.rollout.seed.")
@click.option("--thoughts", is_flag=True, help="Show what stands in <think>, in place of folding it.")
@click.option("--plain", is_flag=True, help="Leave out the run's system and format prompt.")
def chat(
    model: str,
    settings: tuple[str, ...],
    images: tuple[str, ...],
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    thoughts: bool,
    plain: bool,
) -> None:
    """Talk to a MODEL in the terminal: a run's folder, a checkpoint, a Hugging Face folder or a hub name.

    Of a run's folder, the best checkpoint in validation answers, or else the last. Questions get the system and format
    prompt of the checkpoint's run, or of the configuration that you name, as in training. Without a terminal, standard
    input is one question:

    \b
      r1 chat checkpoints/easy_r1/demo
      r1 chat my-model run.yaml --temperature 0
      echo "What is 7 * 8?" | r1 chat my-model --max-tokens 200
      echo "How many shapes?" | r1 chat checkpoints/quickstart/shapes --image picture.png
    """
    from r1_cli.config import ConfigError, load_config
    from r1_data.types import DataError

    path = model_path(chosen := chosen_checkpoint(model))
    with user_errors(ConfigError, DataError):
        words = [*own_configuration(chosen, settings), *settings, f"worker.actor.model.model_path={path}"]
        words += ["data.format_prompt=null", "data.system_prompt=null"] if plain else []
        config, _ = load_config(words, command="chat")

        share_processors()
        from r1_cli.jobs.chat import ChatSampling, open_chat
        from r1_cli.jobs.chat_terminal import Terminal, note, read_terminal
        from r1_cli.jobs.next_steps import next_commands
        from r1_cli.models.load import ModelError
        from r1_rollout.errors import RolloutError

        typed = sys.stdin.isatty()
        with (
            user_errors(ModelError, RolloutError, ValueError),
            open_chat(config, ChatSampling(temperature, max_tokens, seed), plain=plain) as (conversation, lines),
        ):
            for line in (chosen, *lines):
                note(line)
            terminal = Terminal(conversation, write=_write, note=note, show_thoughts=thoughts, live=typed)
            terminal.show(images)
            if not typed:
                terminal.answer(_question())
                return
            note("/help lists the commands; Ctrl-C ends an answer, Ctrl-D the chat")
            terminal.talk(read_terminal)
            if (Path(chosen) / "actor").is_dir():
                note(next_commands([f"merge {shlex.quote(chosen)} --output my-model"])[0])


def _question() -> str:
    question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    if not question:
        raise UserError("standard input holds no question")
    return question


def _write(text: str) -> None:
    click.echo(text, nl=False)
