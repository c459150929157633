"""Print the final checkpoint and the next commands to run, named as the user calls r1."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from r1_cli.checkpoint.folders import NOTHING_SAVED, CheckpointStore, read_state

if TYPE_CHECKING:
    from rich.console import Console

    from r1_cli.train.types import Position

NO_ROWS = " data.val_files=ROWS"  # what `r1 eval` needs besides, if a run's configuration has no validation rows


def print_next_steps(
    console: "Console",
    store: CheckpointStore,
    at: "Position",
    total_steps: int,
    *,
    has_task: bool = True,
    has_rows: bool = True,
    reward_model: bool = False,
) -> None:
    """Print the lines, see `closing_lines`."""
    command = typed_command(sys.argv[0], os.environ)
    for line in closing_lines(
        store,
        at.step,
        total_steps,
        command,
        max(at.idle, at.skipped),
        has_task=has_task,
        has_rows=has_rows,
        reward_model=reward_model,
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def closing_lines(
    store: CheckpointStore,
    step: int,
    total_steps: int,
    command: str,
    idle: int = 0,
    *,
    has_task: bool = True,
    has_rows: bool = True,
    reward_model: bool = False,
) -> list[str]:
    """Return the lines.

    Args:
        command: how the user calls `r1`.
        idle: the latest steps that changed no weight, counted.
        has_task: the run's configuration has rewards to evaluate a model by.
        has_rows: it has validation rows.
    """
    done = f"step {step}/{total_steps}: " + (
        "the run is complete" if step >= total_steps else "the run is not complete"
    )
    latest, best = store.latest(), store.best()
    lines = [done if step >= total_steps else f"{done}; to resume, run the same command again"]
    if latest is None:
        return [*lines, NOTHING_SAVED.replace("will be", "was").replace("ends", "ended")]
    lines.append(f"checkpoint: {latest}")
    chosen = latest
    if best is not None:
        chosen = store.path(best)
        lines.append(f"best in validation: {chosen} (reward {read_state(chosen)['val_reward_score']:.3f})")
    folder = shlex.quote(str(chosen))
    run, task = shlex.quote(str(store.root)), "" if has_rows else NO_ROWS
    task = task if has_task else " TASK.yaml"
    after = [
        f"eval {folder}{task}",
        f"chat {folder}",
        f"merge {folder} --output my-model",
        f"view {run}",
        f"report {run}",
    ]
    if reward_model:
        scores = f"reward_function=reward_model 'worker.reward.reward_function_kwargs={{path: {chosen / 'actor'}}}'"
        after = [f"train TASK.yaml worker.reward.{scores}", f"view {run}", f"report {run}"]
    if 0 < step <= idle:
        reason = "the rewards of each group were equal" if has_task else "the loss was not finite"
        lines.append(f"no step learned anything: {reason}, so the weights have not changed")
        after = [f"diagnose {run}", f"view {run}"]
    return [*lines, *next_commands(after, command)]


def next_commands(words: Sequence[str], command: str | None = None) -> list[str]:
    """Return the lines that name commands of r1; `command` is how the user calls it, None: as this time."""
    command = typed_command(sys.argv[0], os.environ) if command is None else command
    return [f"{'      ' if number else 'next: '}{command} {one}" for number, one in enumerate(words)]


def typed_command(program: str, environment: Mapping[str, str]) -> str:
    """Return how the user calls `r1`; `program` is `sys.argv[0]`, and `uv run` sets a variable."""
    if "UV_RUN_RECURSION_DEPTH" in environment:
        return "uv run r1"
    if Path(program).name != "r1":
        return "python -m r1_cli.main"
    found = shutil.which("r1", path=environment.get("PATH"))
    return "r1" if found and Path(found).resolve() == Path(program).resolve() else shlex.quote(program)
