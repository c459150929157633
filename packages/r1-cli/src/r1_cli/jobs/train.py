"""`r1 train`, from a checked configuration to a trained checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed import DistError

from r1_cli.build.algorithm import build_schedule, try_algorithm
from r1_cli.cluster.ray_connection import RayConnection
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import Provenance, RunConfig
from r1_cli.faults.watchdog import HungError, Watchdog
from r1_cli.hardware import release_memory
from r1_cli.jobs.context import RunFolder, TrainingContext, find_restart, open_folder, open_training
from r1_cli.jobs.data import PromptData, open_data, open_stream, show_plan
from r1_cli.jobs.logs import Logs, open_logs, open_saving
from r1_cli.jobs.models import Models, check_models, load_models, resume
from r1_cli.jobs.next_steps import print_next_steps
from r1_cli.jobs.rollout import Sampling, open_sampler, open_sampling
from r1_cli.plan.disk import require_disk_space
from r1_cli.runs.restarts import Restarts
from r1_cli.runs.track.console import configure_logging
from r1_cli.train import loop
from r1_cli.train.run import TrainingRun
from r1_cli.train.types import Policy, Position, Schedule, Teacher
from r1_rollout.errors import EnginesDisagree, ServerError, StaleWeights
from r1_rollout.pool.tasks import MemberLost

# Errors of processes, engines and connections. What a user can correct, and what a user's code raises, is not here.
LOST = (ClusterError, MemberLost, ServerError, HungError, DistError)
# Errors that may be a property of the run: the same one at the same step again ends it.
DOUBTFUL = (StaleWeights, EnginesDisagree)


@dataclass(frozen=True, slots=True)
class Opened:
    """A run before its next step."""

    run: TrainingRun
    at: Position
    manifest_entry: dict[str, Any]  # of this start; its `end` says how the run ended
    next_steps: Mapping[str, bool] = field(default_factory=dict)  # what `print_next_steps` has to know of it


def train(config: RunConfig, provenance: Provenance, *, until: int | None = None, answers: Path | None = None) -> int:
    """Train as configured, from the newest checkpoint of the run's folder if it has one.

    Args:
        until: end after this step; steps up to it are those of the whole run.
        answers: a run's folder, whose record stands for tools, environments and agents.

    Returns:
        The exit code: 0, or 128 and the number of the signal that ended the run.

    Raises: as `open_training_run`.
    """
    console = Console()
    configure_logging(console)
    try_algorithm(config)
    require_disk_space(config)

    def attempt(folder: RunFolder, stack: ExitStack) -> RunEnd:
        opened = open_training_run(config, provenance, folder, console, stack, until=until, answers=answers)
        if config.trainer.val_only:
            with opened.run.stop.listening():
                return RunEnd(validate_only(opened.run, opened.at))
        return take_steps(opened, loop.train, folder)

    return run_with_restarts(config, attempt).finish(console, shown=until is None)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run has ended, when all that it had opened is closed."""

    exit_code: int
    next_steps: Callable[[Console], None] | None = None  # prints them

    def finish(self, console: Console, *, shown: bool) -> int:
        if shown and self.next_steps is not None:
            self.next_steps(console)
        return self.exit_code


def run_with_restarts(config: RunConfig, attempt: Callable[[RunFolder, ExitStack], RunEnd]) -> RunEnd:
    """Lock the run's folder and call `attempt` with it and a stack; call it again after a fault of the run's processes.

    Ray's processes and this process's imports stay between attempts. The last fault is raised if the run may not start
    again, by `trainer.max_restarts`.
    """
    trainer = config.trainer
    with ExitStack() as stack:
        folder = open_folder(config, stack)
        restarts = Restarts(trainer, folder.path)
        connection = stack.enter_context(RayConnection[Path]())
        watchdog = Watchdog(folder.path, trainer.phase_timeout)
        stack.enter_context(watchdog.guarding())
        folder = replace(folder, restarts=restarts, connection=connection, watchdog=watchdog)
        if again := restarts.after_death():
            folder = replace(folder, start=find_restart(config, folder.store, restarts.began))
        while True:
            try:
                with ExitStack() as own:
                    return attempt(replace(folder, restart=again), own)
            except (*LOST, *DOUBTFUL) as error:
                cause = watchdog.take_cause() or " ".join([str(error), *vars(error).get("__notes__", ())])
                again = restarts.allow(cause, type(error).__name__, repeats=isinstance(error, LOST))
                if again is None:
                    raise
                if isinstance(error, DOUBTFUL):
                    connection.end_kept()
            again.end_phase("closed")
            release_memory()  # outside the handler, whose traceback holds the models
            folder = replace(folder, start=find_restart(config, folder.store, restarts.began))


def take_steps(opened: Opened, train: Callable[[TrainingRun, Position], Position], folder: RunFolder) -> RunEnd:
    """Let `train` take the remaining steps of a run, or those until a signal, which the manifest then names."""
    if folder.restarts is not None:
        folder.restarts.begin()
    with opened.run.stop.listening(), opened.run.watchdog.watching():
        last = train(opened.run, opened.at)
    code, total, has = opened.run.stop.exit_code, opened.run.schedule.total_steps, opened.next_steps
    if code:
        opened.manifest_entry["end"] = f"left after step {last.step}, by a signal"
    return RunEnd(code, lambda console: print_next_steps(console, folder.store, last, total, **has))


def open_training_run(
    config: RunConfig,
    provenance: Provenance,
    folder: RunFolder,
    console: Console,
    stack: ExitStack,
    *,
    until: int | None = None,
    answers: Path | None = None,
) -> Opened:
    """Load what the run consists of; `stack` closes it. Arguments as of `train`.

    Raises:
        ConfigError, DataError, ModelError, RewardSpecError: something cannot work; found before the first step.
        ClusterError: a rank is gone.
    """
    # Processes start while this one reads the data, engines reserve memory before the learner's weights are loaded,
    # and nothing trains before rows, rewards and layouts are checked.
    context = open_training(config, provenance, folder, console, stack)
    data = open_data(context, answers)
    plan = show_plan(context, data)
    schedule = build_schedule(context.config, plan.total_steps or 0, until)
    stream = open_stream(context, data)
    models = load_models(context, schedule)
    context, micro_batches = check_models(context, data, models)
    at = resume(context, data, models, micro_batches)
    context.begin(at.step, schedule.total_steps)
    logs = open_logs(context, data, at, schedule.total_steps)
    sampler = open_sampler(context, data, models, logs.recorder)
    sampling = open_sampling(context, data, schedule, stream, sampler, at)
    run = assemble(context, data, models, logs, schedule, sampling)
    return Opened(run, at, logs.manifest_entry, {"has_rows": run.validation is not None})


def assemble(
    context: TrainingContext, data: PromptData, models: Models, logs: Logs, schedule: Schedule, sampling: Sampling
) -> loop.Run:
    saving = open_saving(context)
    return loop.Run(
        learner=models.learner,
        engine=sampling.engine,
        collector=sampling.collector,
        async_sampler=sampling.async_sampler,
        update=sampling.update,
        schedule=schedule,
        validation=sampling.validation,
        teacher=open_teacher(context, models.learner, data),
        store=saving.store,
        saver=saving.saver,
        tracker=logs.tracker,
        recorder=logs.recorder,
        stop=saving.stop,
        assets=saving.assets,
        copies=saving.copies,
        critic=models.critic,
        timeline=context.timeline,
        watchdog=context.folder.watchdog,
    )


def open_teacher(context: TrainingContext, learner: Policy, data: PromptData) -> Teacher | None:
    if not context.config.worker.teacher.used:
        return None
    from r1_cli.build.teacher import build_teacher

    return build_teacher(context.config, context.hardware, context.model, learner, data.teachers)


def validate_only(run: TrainingRun, at: Position) -> int:
    """Log the validation of the current weights; return the exit code."""
    if not run.validates:
        raise ValueError("there is nothing to validate on: data.val_files is null")
    run.tracker.log(at.step, *run.validate(at.step))
    loop.flush(run)
    return 0
