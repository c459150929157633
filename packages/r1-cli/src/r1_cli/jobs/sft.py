"""`r1 sft`, from a checked configuration to a fine-tuned checkpoint, over the phases of `r1 train`."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

from rich.console import Console

from r1_cli.build.algorithm import build_objective, build_preference, build_schedule
from r1_cli.build.demonstrations import (
    as_demonstrations,
    build_conversation_renderer,
    build_demonstrations,
)
from r1_cli.build.prompts import build_stream, read_rates
from r1_cli.build.rendering import build_renderer, open_workers
from r1_cli.build.reward_model import as_classifier
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import Provenance, RunConfig
from r1_cli.config.fine_tuning import as_training
from r1_cli.config.section import with_value
from r1_cli.config.sources import Source, training_sources, validation_sources
from r1_cli.jobs.context import RunFolder, TrainingContext, open_training
from r1_cli.jobs.data import Data, DataSplit
from r1_cli.jobs.data import open_data as open_prompts
from r1_cli.jobs.logs import Logs, Saving, open_logs, open_saving
from r1_cli.jobs.models import Models, Trained, check_models, load_engine, prepare_trained, resume
from r1_cli.jobs.rollout import open_sampler, open_validation
from r1_cli.jobs.train import Opened, RunEnd, run_with_restarts, take_steps
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
    require_disk_space(as_training(config))

    def attempt(folder: RunFolder, stack: ExitStack) -> RunEnd:
        opened = open_fine_tuning_run(config, provenance, folder, console, stack, until=until)
        return take_steps(opened, run.train, folder)

    return run_with_restarts(config, attempt).finish(console, shown=until is None)


def open_fine_tuning_run(
    config: RunConfig,
    provenance: Provenance,
    folder: RunFolder,
    console: Console,
    stack: ExitStack,
    *,
    until: int | None = None,
) -> Opened:
    """Load what the run consists of; `stack` closes it. Arguments and errors as of `fine_tune`."""
    learning, samples = as_training(config), config.sft.val_generations  # as the learner sees it
    training = open_training(learning, provenance, folder, console, stack, samples=samples)
    if config.sft.loss == "reward":
        training = replace(training, model=as_classifier(training.model))
    devices = training.config.trainer.n_gpus_per_node
    context = replace(training, config=with_value(config, "trainer.n_gpus_per_node", devices))
    data = open_data(context)
    rows, batch = data.training, training.config.worker.actor.global_batch_size
    stream = build_stream(training.config, rows.prompts, rows.sources, rows.rates, batch, drop_last=False)
    plan = plan_of(training.config, data, stream)
    show_plan(console, context.config, provenance, plan, context.placement)
    schedule = build_schedule(training.config, plan.total_steps, until)
    data.training.prompts.prefetch(stream.batch(0))
    models = prepare_trained(training, schedule)()
    training, micro_batches = check_models(training, data, models, context.config)
    at = resume(training, data, models, micro_batches)
    context.begin(at.step, schedule.total_steps)
    logs = open_logs(context, data, at, schedule.total_steps)
    generation = open_generation(context, models, logs) if config.sft.val_generations else None
    tuning = build_fine_tuning(training, data, models, schedule, stream, open_saving(context), logs, generation)
    after = {
        "has_task": config.worker.reward.reward_function is not None,
        "has_rows": bool(validation_sources(config.data)),
        "reward_model": config.sft.loss == "reward",
    }
    return Opened(tuning, at, logs.manifest_entry, after)


def build_fine_tuning(
    context: TrainingContext,
    data: Data,
    models: Trained,
    schedule: Schedule,
    stream: Stream | WeightedStream,
    saving: Saving,
    logs: Logs,
    generation: Callable[[], Validation | None] | None,
) -> fine_tuning.FineTuning:
    return fine_tuning.FineTuning(
        copies=saving.copies,
        learner=models.learner,
        schedule=schedule,
        store=saving.store,
        saver=saving.saver,
        tracker=logs.tracker,
        recorder=logs.recorder,
        stop=saving.stop,
        assets=saving.assets,
        timeline=context.timeline,
        watchdog=context.folder.watchdog,
        reader=DemonstrationReader(as_demonstrations(data.training.prompts)),
        stream=stream,
        rates=data.training.rates.of_rows if data.training.rates else None,
        steps_per_epoch=stream.batches_per_epoch,
        objective=build_objective(context.config),
        preference=build_preference(context.config),
        tokenizer=context.model.tokenizer,
        val_readers=[DemonstrationReader(as_demonstrations(part)) for part in data.validation.prompts.parts],
        val_batch_size=context.config.data.val_batch_size,
        open_generation=generation,
    )


def open_data(context: TrainingContext) -> Data:
    """Open all sources and check every row. Raises DataError if one cannot be used."""
    config, counter = context.config, context.reporter.counter
    renderer = build_renderer(config, context.model)
    conversations = build_conversation_renderer(config, renderer)
    workers = context.stack.enter_context(open_workers(config, conversations, context.timeline.record))
    training, validation = (
        DataSplit(sources, opened, build_demonstrations(config, opened, conversations, workers, counter))
        for sources, opened in (
            open_split(config, training_sources(config.data)),
            open_split(config, validation_sources(config.data), prompts_do=config.sft.val_generations),
        )
    )
    return Data(replace(training, rates=read_rates(config, training.opened, training.prompts)), validation, renderer)


def open_split(
    config: RunConfig, sources: list[Source], *, prompts_do: bool = False
) -> tuple[list[Source], list[OpenSource]]:
    """Open sources of conversations. With `prompts_do`, one without what the loss reads is left to sampling.

    Raises DataError otherwise.
    """
    wanted = config.sft.wanted
    if not prompts_do:
        return sources, open_sources(sources, wanted)
    found = list[OpenSource]()
    for source in sources:
        try:
            [one] = open_sources([source], wanted)
            require_compared(one)
            found.append(one)
        except DataError as error:
            log.info("no validation loss of %s, whose prompts are answered by sampling: %s", source.name, error)
    return [one.source for one in found], found


def require_compared(opened: OpenSource) -> None:
    """Raise DataError if the loss compares answers, and no row has the column that it compares with."""
    others = opened.source.conversation.others
    needed = {"pairs": others.rejected, "labels": others.label}.get(opened.wanted or "")
    if needed and all(needed not in row for _, row in opened.rows):
        raise DataError(f"no row has the column {needed}")


def plan_of(training: RunConfig, data: Data, stream: Stream | WeightedStream) -> FineTuningPlan:
    left_out = sum(part.summary.read - part.summary.kept for part in data.training.prompts.parts)
    rows, val_rows, rates = as_demonstrations(data.training.prompts), len(data.validation.prompts), data.training.rates
    outside = rates.outside if rates else 0
    return make_plan(training, rows, left_out, val_rows, stream.batches_per_epoch, outside)


def open_generation(context: TrainingContext, models: Trained, logs: Logs) -> Callable[[], Validation | None]:
    """Check the validation prompts and their rewards; return what opens the engine when a validation first samples."""
    config = with_value(with_value(context.config, "data.train_files", None), "data.sources", None)
    validating = replace(context, config=config)
    data = open_prompts(validating)

    @cache
    def open_once() -> Validation | None:
        opened = Models(models.learner, models.critic, load_engine(validating, models.learner))
        return open_validation(validating, data, open_sampler(validating, data, opened, logs.recorder))

    return open_once
