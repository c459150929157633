"""The `r1` command. Each command imports what it needs only when it runs, so that `r1 --help` is instant."""

import click
from click.shell_completion import get_completion_class

from r1_cli.commands.chat import chat
from r1_cli.commands.check import check
from r1_cli.commands.convert import convert
from r1_cli.commands.data import data
from r1_cli.commands.env import env
from r1_cli.commands.estimate import estimate
from r1_cli.commands.evaluate import evaluate
from r1_cli.commands.init import init
from r1_cli.commands.models import merge
from r1_cli.commands.processes import logs, ps, stop
from r1_cli.commands.replay import replay
from r1_cli.commands.rewards import reward, score_a
from r1_cli.commands.runs import diagnose, diff, report, view
from r1_cli.commands.sample import rows, sample
from r1_cli.commands.sft import sft
from r1_cli.commands.stages import run
from r1_cli.commands.train import train
from r1_cli.faults.supervisor import supervise_command

SHELLS = ("bash", "zsh", "fish")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="r1-cli", prog_name="r1")
def main() -> None:
    """Post-train language and vision-language models with reinforcement learning."""


@click.command(short_help="Print a shell completion script.")
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


def run_program() -> None:
    """Run `r1` as a program of its own: what trains is started again if the system kills it."""
    supervise_command()
    main()


main.add_command(init)
main.add_command(train)
main.add_command(sft)
main.add_command(evaluate)
main.add_command(sample)
main.add_command(rows)
main.add_command(run)
main.add_command(check)
main.add_command(estimate)
main.add_command(merge)
main.add_command(chat)
main.add_command(reward)
main.add_command(env)
main.add_command(data)
main.add_command(convert)
main.add_command(score_a)
main.add_command(view)
main.add_command(diagnose)
main.add_command(replay)
main.add_command(diff)
main.add_command(report)
main.add_command(ps)
main.add_command(stop)
main.add_command(logs)
main.add_command(completion)

if __name__ == "__main__":
    run_program()
