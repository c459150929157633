"""`r1 sft`, from a checked configuration to a fine-tuned checkpoint, over the phases of `session`."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import torch
from rich.console import Console

from r1_cli.build.algorithm import build_objective, build_preference
from r1_cli.build.demonstrations import (
    as_demonstrations,
    build_conversation_renderer,
    build_demonstrations,
    build_row_stream,
    wanted_rows,
)
from r1_cli.build.rendering import build_renderer, open_workers
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import Provenance, RunConfig
from r1_cli.config.fine_tuning import as_training
from r1_cli.config.section import with_value
from r1_cli.config.sources import Source, training_sources, validation_sources
from r1_cli.jobs.next_steps import print_next_steps
from r1_cli.jobs.session import TrainingSession, build_schedule
from r1_cli.jobs.startup import Data, DataSplit, Devices, Logs, Models, Reports, RunFolder, Saving, Trained
from r1_cli.plan.disk import require_disk_space
from r1_cli.plan.fine_tuning import FineTuningPlan, make_plan, show_plan
from r1_cli.runs.track.console import configure_logging
from r1_cli.train import fine_tuning, run
from r1_cli.train.demonstrations import DemonstrationReader
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.types import Schedule
from r1_data.stream import Stream, WeightedStream
from r1_data.types import DataError

log = logging.getLogger("r1")


def fine_tune(config: RunConfig, provenance: Provenance, *, until: int | None = None) -> int:
    """Fine-tune as configured, from the newest checkpoint of the run's folder if it has one.

    Returns:
        The exit code: 0, or 128 and the number of the signal that ended the run.

    Raises:
        ConfigError, DataError, ModelError: something cannot work; found before the first step.
        ClusterError: a rank is gone.
    """
    console = Console()
    configure_logging(console)
    training = as_training(config)  # as the learner sees it
    require_disk_space(training)
    with ExitStack() as stack:
        session = TrainingSession(console, provenance, stack, torch.get_num_threads())
        folder = session.open_folder(config)
        training, devices = session.reserve_devices(training, folder)
        config = with_value(config, "trainer.n_gpus_per_node", training.trainer.n_gpus_per_node)
        reports = session.open_reports(config, folder)
        data = open_data(config, devices, reports, stack)
        stream = build_row_stream(training, data.training.prompts, data.training.sources)
        plan = plan_of(training, data, stream.batches_per_epoch)
        show_plan(console, config, provenance, plan)
        schedule = build_schedule(training, plan.total_steps, until)
        data.training.prompts.prefetch(stream.batch(0))
        models = Trained(*session.prepare_learner(training, devices, schedule)())
        training, micro_batches = session.check_models(training, folder, devices, data, models, config)
        at = session.resume(training, folder, data, models, micro_batches)
        reports.begin(config, at.step, schedule.total_steps)
        logs = session.open_logs(config, folder, devices, data, reports, at)
        asked = config.sft.val_generations
        generation = open_generation(session, config, folder, devices, reports, models, logs) if asked else None
        saving = session.open_saving(config, folder, devices, reports)
        tuning = build_fine_tuning(
            config, training, data, devices, models, schedule, stream, saving, logs, reports, generation
        )
        last = run.train(tuning, at)
        if saving.stop.exit_code:
            logs.manifest_entry["end"] = f"left after step {last.step}, by a signal"
    if until is None:
        has_task = config.worker.reward.reward_function is not None
        print_next_steps(console, folder.store, last, schedule.total_steps, has_task=has_task)
    return saving.stop.exit_code


def build_fine_tuning(
    config: RunConfig,
    training: RunConfig,
    data: Data,
    devices: Devices,
    models: Trained,
    schedule: Schedule,
    stream: Stream | WeightedStream,
    saving: Saving,
    logs: Logs,
    reports: Reports,
    generation: Callable[[], Validation | None] | None,
) -> fine_tuning.FineTuning:
    return fine_tuning.FineTuning(
        learner=models.learner,
        schedule=schedule,
        store=saving.store,
        saver=saving.saver,
        tracker=logs.tracker,
        recorder=logs.recorder,
        stop=saving.stop,
        assets=saving.assets,
        timeline=reports.timeline,
        reader=DemonstrationReader(as_demonstrations(data.training.prompts)),
        stream=stream,
        steps_per_epoch=stream.batches_per_epoch,
        objective=build_objective(training),
        preference=build_preference(config),
        tokenizer=devices.model.tokenizer,
        val_readers=[DemonstrationReader(as_demonstrations(part)) for part in data.validation.prompts.parts],
        val_batch_size=config.data.val_batch_size,
        open_generation=generation,
    )


def open_data(config: RunConfig, devices: Devices, reports: Reports, stack: ExitStack) -> Data:
    """Open all sources and check every row. Raises DataError if one cannot be used."""
    renderer = build_renderer(config, devices.model)
    conversations = build_conversation_renderer(config, renderer)
    workers = stack.enter_context(open_workers(config, conversations, reports.timeline.record))
    counter = reports.console.counter
    training, validation = (
        DataSplit(sources, opened, build_demonstrations(config, opened, conversations, workers, counter))
        for sources, opened in (
            open_split(config, training_sources(config.data)),
            open_split(config, validation_sources(config.data), prompts_do=config.sft.val_generations),
        )
    )
    return Data(training, validation, renderer)


def open_split(
    config: RunConfig, sources: list[Source], *, prompts_do: bool = False
) -> tuple[list[Source], list[OpenSource]]:
    """Open sources of conversations. With `prompts_do`, a source of mere prompts is left out, as answers are sampled.

    Raises DataError otherwise.
    """
    wanted = wanted_rows(config)
    if not prompts_do:
        return sources, open_sources(sources, wanted)
    found = list[tuple[Source, OpenSource]]()
    for source in sources:
        try:
            found += zip([source], open_sources([source], wanted), strict=True)
        except DataError as error:
            log.info("no val/nll of %s, whose prompts are answered by sampling: %s", source.name, error)
    return [source for source, _ in found], [one for _, one in found]


def plan_of(training: RunConfig, data: Data, steps_per_epoch: int) -> FineTuningPlan:
    left_out = sum(part.summary.read - part.summary.kept for part in data.training.prompts.parts)
    return make_plan(
        training, as_demonstrations(data.training.prompts), left_out, len(data.validation.prompts), steps_per_epoch
    )


def open_generation(
    session: TrainingSession,
    config: RunConfig,
    folder: RunFolder,
    devices: Devices,
    reports: Reports,
    models: Trained,
    logs: Logs,
) -> Callable[[], Validation | None]:
    """Check the validation prompts and their rewards; return what opens the engine when a validation first samples."""
    config = with_value(with_value(config, "data.train_files", None), "data.sources", None)
    data = session.open_data(config, devices, reports)

    @cache
    def open_validation() -> Validation | None:
        engine = session.open_engine(config, devices, models.learner)
        opened = Models(models.learner, models.critic, engine)
        sampler = session.connect_rewards(config, folder, devices, data, opened, reports, logs)
        return session.open_validation(config, data, reports, sampler)

    return open_validation
