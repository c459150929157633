"""`r1 init`: write the files of a new task."""

import shlex
from pathlib import Path

import click

from r1_cli.commands.common import UserError, user_errors, writing


@click.command(short_help="Write a configuration, a reward and rows for a task of your own.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("my-task"))
@click.option("--task", metavar="KIND", help="What the model answers: number, choice, text, json or picture.")
@click.option("--model", help="A folder or a name on the hub.")
@click.option("--lora/--full", default=None, help="Train an adapter, or all weights.")
def init(folder: Path, task: str | None, model: str | None, lora: bool | None) -> None:
    """Write config.yaml, reward.py, format_prompt.jinja and three rows to FOLDER, by default my-task.

    Asks three questions, unless flags answer them. The files pass `r1 check` as they are; put your own rows and reward
    in their places:

    \b
      r1 init
      r1 init my-task --task picture --model Qwen/Qwen2.5-VL-3B-Instruct --lora
    """
    from r1_cli.jobs.new_task import TASKS, task_files
    from r1_cli.jobs.next_steps import next_commands

    kinds = "\n".join(f"  {name:<8} {one.title}" for name, one in TASKS.items())
    if task is None:
        click.echo(f"What does the model answer?\n{kinds}")
        task = _ask("kind", "number", *TASKS)
    if task not in TASKS:
        raise UserError(f"--task {task} is none of:\n{kinds}")
    model = model or _ask("Which model? A folder, or a name on the hub", TASKS[task].model)
    if lora is None:
        lora = _ask("Train all weights, or a LoRA adapter, which takes less memory?", "full", "full", "lora") == "lora"
    with user_errors(ValueError):
        files = task_files(folder, task, model.strip(), lora=lora)
    if there := [str(path) for path in files if path.exists()]:
        raise UserError(f"{', '.join(there)} exists and is not overwritten; name another folder")
    for path, content in files.items():
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        click.echo(path)
    config = shlex.quote(str(folder / "config.yaml"))
    for line in next_commands([f"check {config}", f"train {config} --dry-run", f"train {config}"]):
        click.echo(line)


def _ask(question: str, default: str, *choices: str) -> str:
    try:
        kind = click.Choice(choices) if choices else None
        return str(click.prompt(question, default=default, type=kind, show_choices=bool(choices)))
    except click.Abort as error:
        raise UserError("r1 init was not answered; --task, --model and --lora or --full answer it, too") from error
