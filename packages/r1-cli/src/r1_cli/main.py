"""The `r1` command. Each command imports what it needs only when it runs, so that `r1 --help` is instant."""

import click

from r1_cli.commands.check import check
from r1_cli.commands.completion import completion
from r1_cli.commands.convert import convert
from r1_cli.commands.data import data
from r1_cli.commands.diagnose import diagnose
from r1_cli.commands.diff import diff
from r1_cli.commands.estimate import estimate
from r1_cli.commands.eval import evaluate
from r1_cli.commands.merge import merge
from r1_cli.commands.replay import replay
from r1_cli.commands.report import report
from r1_cli.commands.reward import reward
from r1_cli.commands.score_a import score_a
from r1_cli.commands.train import train
from r1_cli.commands.view import view


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="r1-cli", prog_name="r1")
def main() -> None:
    """Post-train language and vision-language models with reinforcement learning."""


main.add_command(train)
main.add_command(evaluate)
main.add_command(check)
main.add_command(estimate)
main.add_command(merge)
main.add_command(reward)
main.add_command(data)
main.add_command(convert)
main.add_command(score_a)
main.add_command(view)
main.add_command(diagnose)
main.add_command(replay)
main.add_command(diff)
main.add_command(report)
main.add_command(completion)

if __name__ == "__main__":
    main()
