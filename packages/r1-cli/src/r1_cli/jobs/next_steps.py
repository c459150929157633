"""Print the final checkpoint and the next commands to run."""

import os
import shlex
import sys

from rich.console import Console

from r1_cli.checkpoint.folders import CheckpointStore, read_state
from r1_cli.jobs.typed_commands import next_commands, typed_command
from r1_cli.plan.announce import NOTHING_SAVED
from r1_cli.train.types import Position


def print_next_steps(
    console: Console,
    store: CheckpointStore,
    at: Position,
    total_steps: int,
    *,
    has_task: bool = True,
    reward_model: bool = False,
) -> None:
    """Print the lines. Without `has_task`, the run's configuration has no rewards to evaluate a model by."""
    command = typed_command(sys.argv[0], os.environ)
    for line in closing_lines(
        store, at.step, total_steps, command, at.idle, has_task=has_task, reward_model=reward_model
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
    reward_model: bool = False,
) -> list[str]:
    """Return the lines. `command` is how the user calls `r1`; `idle` counts the latest steps without signal."""
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
    run, task = shlex.quote(str(store.root)), "" if has_task else " TASK.yaml"
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
