"""`r1 run`: run the stages of one file, such as sft, train, sample, rows, sft, train, eval."""

import shlex
from pathlib import Path

import click

from r1_cli.commands.common import Existing, UserError, user_errors, writing


@click.command(short_help="Run several commands as the stages of one file.")
@click.argument("file", type=Existing(file=True), metavar="STAGES.yaml")
@click.option("--dry-run", is_flag=True, help="Show which stages would run, and stop.")
def run(file: Path, dry_run: bool) -> None:
    """Run the stages of a file one after the other: train, sft, sample, rows, eval and merge.

    A stage's input may be another's output, as in model: ${stages.cold.model}. Stages whose inputs have not changed are
    skipped. Run the same command again to resume after an interruption:

    \b
      r1 run stages.yaml --dry-run
      r1 run stages.yaml
    """
    from r1_cli.checkpoint.folders import CheckpointError
    from r1_cli.checkpoint.locks import lock_folder
    from r1_cli.config import ConfigError
    from r1_cli.config.stages import read_stages
    from r1_cli.jobs.stages import StageError, StageRun
    from r1_cli.runs.report.stages import write_stages_report

    with user_errors(ConfigError, CheckpointError):
        stages = read_stages(file)
        plan = StageRun(stages)
        plan.check()
        states = plan.states()
        for number, one in enumerate(stages.stages, start=1):
            needs = f", reads {', '.join(one.needs)}" if one.needs else ""
            click.echo(f"{number}/{len(stages.stages)} {one.name}: r1 {one.command}{needs}: {states[one.name]}")
        if dry_run:
            return
        with writing(stages.output):
            stages.output.mkdir(parents=True, exist_ok=True)
            with lock_folder(stages.output, ".stages.lock", key="output"):
                plan.begin()
                for number, one in enumerate(stages.stages, start=1):
                    if plan.state(one) != "complete":
                        click.echo(f"r1 run: stage {number}/{len(stages.stages)} {one.name}")
                        try:
                            plan.run(one)
                        except StageError as error:
                            if error.stopped_by is None:
                                raise UserError(str(error)) from error
                            click.echo(f"r1: {error}", err=True)
                            raise SystemExit(128 + error.stopped_by) from error  # as of `r1 train`
                page = write_stages_report(stages.output)
    click.echo(f"all {len(stages.stages)} stages are complete: {page}")
    print_results(stages.output)


def print_results(output: Path) -> None:
    """Print what each evaluation measured, and the commands to run next."""
    from r1_cli.jobs.next_steps import next_commands
    from r1_cli.runs.stages import read_stage_results, recorded_folders

    results = read_stage_results(output)[1]
    for one in results:
        if measured := one.measured:
            click.echo(f"  {one.name}: {measured}")
    trained = [one.output for one in results if one.output and one.output.name.startswith("global_step_")]
    words = [f"chat {shlex.quote(str(trained[-1]))}"] if trained else []
    if recorded_folders([output]) != [output]:
        words.append(f"view {shlex.quote(str(output))}")
    for line in next_commands(words):
        click.echo(line)
