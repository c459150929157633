"""`r1 completion`: what a shell has to read so that it completes commands, options and files."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print what makes a shell complete r1's commands.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL.

    \b
      r1 completion bash >> ~/.bashrc
      r1 completion zsh  >> ~/.zshrc
      r1 completion fish > ~/.config/fish/completions/r1.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.find_root().command, {}, "r1", "_R1_COMPLETE").source())
