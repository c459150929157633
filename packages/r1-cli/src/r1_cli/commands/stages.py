"""`r1 run`: run the stages of one file, such as sft, train, sample, rows, sft, train, eval."""

from pathlib import Path

import click

from r1_cli.commands.common import Existing, user_errors, writing


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
    from r1_cli.runs.report.stages import StageResult, write_stages_report

    with user_errors(ConfigError, StageError, CheckpointError):
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
                for one in stages.stages:
                    if plan.states()[one.name] != "stands":
                        click.echo(f"r1 run: stage {one.name}")
                        plan.run(one)
                page, results = stages.output / "report.html", []
                for one in stages.stages:
                    folder = plan.folders[one.name]
                    known, output = folder.record(), folder.output
                    assert output is not None
                    results.append(
                        StageResult(one.name, str(known.get("typed")), folder.path, output, float(known["seconds"]))
                    )
                write_stages_report(page, file.stem, results)
    click.echo(f"all {len(results)} stages are complete: {page}")
    trained = [one.output for one in results if one.output.name.startswith("global_step_")]
    if trained:
        click.echo(f"next: r1 eval {trained[-1]}")
