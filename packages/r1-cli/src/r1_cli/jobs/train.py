"""`r1 train`, from a checked configuration to a trained checkpoint."""

from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console

from r1_cli.build.algorithm import try_algorithm
from r1_cli.config import Provenance, RunConfig
from r1_cli.jobs.next_steps import print_next_steps
from r1_cli.jobs.session import TrainingSession, build_schedule
from r1_cli.plan.disk import require_disk_space
from r1_cli.runs.track.console import configure_logging
from r1_cli.train import loop
from r1_cli.train.types import Position


def train(config: RunConfig, provenance: Provenance, *, until: int | None = None, answers: Path | None = None) -> int:
    """Train as configured, from the newest checkpoint of the run's folder if it has one.

    Args:
        until: end after this step; steps up to it are those of the whole run.
        answers: a run's folder, whose record stands for tools, environments and agents.

    Returns:
        The exit code: 0, or 128 and the number of the signal that ended the run.

    Raises:
        ConfigError, DataError, ModelError, RewardSpecError: something cannot work; found before the first step.
        ClusterError: a rank is gone.
    """
    console = Console()
    configure_logging(console)
    try_algorithm(config)
    require_disk_space(config)
    with ExitStack() as stack:
        session = TrainingSession(console, provenance, stack, torch.get_num_threads())
        folder = session.open_folder(config)
        config, devices = session.reserve_devices(config, folder)
        reports = session.open_reports(config, folder)
        data = session.open_data(config, devices, reports, answers)
        plan = session.show_plan(config, devices, data)
        schedule = build_schedule(config, plan.total_steps or 0, until)
        stream = session.open_stream(config, folder, data)
        models = session.load_models(config, devices, schedule)
        config, micro_batches = session.check_models(config, folder, devices, data, models)
        at = session.resume(config, folder, data, models, micro_batches)
        reports.begin(config, at.step, schedule.total_steps)
        logs = session.open_logs(config, folder, devices, data, reports, at)
        sampler = session.connect_rewards(config, folder, devices, data, models, reports, logs)
        sampling = session.open_sampling(config, folder, data, reports, schedule, stream, sampler, at)
        run = session.open_run(config, folder, devices, data, reports, models, logs, schedule, sampling)
        if config.trainer.val_only:
            return validate_only(run, at)
        last = loop.train(run, at)
        if run.stop.exit_code:
            logs.manifest_entry["end"] = f"left after step {last.step}, by a signal"
    if until is None:
        print_next_steps(console, folder.store, last, schedule.total_steps)
    return run.stop.exit_code


def validate_only(run: loop.Run, at: Position) -> int:
    """Log the validation of the current weights; return the exit code."""
    if run.validation is None:
        raise ValueError("there is nothing to validate on: data.val_files is null")
    run.tracker.log(at.step, *run.validate(at.step))
    loop.flush(run)
    return 0
