"""The rollout of a run: its rewards, connected to their models, its sampler and its validation."""

from dataclasses import dataclass
from functools import partial

from r1_cli.build.algorithm import build_update
from r1_cli.build.canary import build_canary
from r1_cli.build.prompts import build_validation
from r1_cli.build.rewards.connect import connect_references, in_training
from r1_cli.build.rewards.dispatch import require_columns
from r1_cli.build.sampler import build_collector, build_sampler, build_sampling, with_record
from r1_cli.jobs.context import TrainingContext
from r1_cli.jobs.data import PromptData
from r1_cli.jobs.models import Models
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder
from r1_cli.train.sampling.async_sampler import AsyncSampler, load_pending_steps
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.sampling.weight_check import add_weight_check
from r1_cli.train.types import Position, PromptStream, Sampler, Schedule, Update
from r1_rollout.types import Generator


@dataclass(frozen=True, slots=True)
class Sampling:
    engine: Generator  # behind the weight check
    collector: DynamicSampling
    async_sampler: AsyncSampler | None  # samples later steps while the learner computes
    validation: Validation | None
    update: Update


def connect_rewards(context: TrainingContext, data: PromptData, models: Models) -> None:
    """Connect rewards to their models.

    Raises:
        ConfigError, ModelError, RewardSpecError: a reward lacks a column, a model or base scores.
    """
    config, model, folder = context.config, context.model, context.folder
    require_columns(data.verifier, data.sources, data.parts)
    connect_references(
        config,
        data.verifier,
        model,
        [*data.training.named(), *data.validation.named()],
        [folder.path, *([folder.start.parent] if folder.start else [])],
        partial(in_training, config, context.hardware, model, models.learner),
        models.engine,
        context.reporter.progress,
        resumed=folder.start is not None,
    )


def open_sampler(context: TrainingContext, data: PromptData, models: Models, recorder: Recorder) -> Sampler:
    """Connect rewards to their models, and the engine to the weight check.

    Raises:
        ConfigError, ModelError, RewardSpecError: as `connect_rewards`.
        EngineError: the engine's weights cannot be checked.
    """
    config, model, learner = context.config, context.model, models.learner
    connect_rewards(context, data, models)
    sampler = build_sampler(config, model, data.verifier, models.engine, with_record(data.player, recorder))
    if not config.worker.rollout.canary:
        return sampler
    return add_weight_check(sampler, learner, build_canary(config, context.hardware, model, data.renderer, learner))


def open_sampling(
    context: TrainingContext, data: PromptData, schedule: Schedule, stream: PromptStream, sampler: Sampler, at: Position
) -> Sampling:
    config, prompts, start = context.config, data.training.prompts, context.folder.start
    validation = open_validation(context, data, sampler)
    update = build_update(config, updates_per_step=schedule.updates_per_step)
    training, _ = build_sampling(config)
    progress, rates = context.reporter.progress, data.training.rates.of_rows if data.training.rates else None
    collector = build_collector(config, prompts, stream, training, sampler, update, progress, rates)
    async_sampler = None
    if config.trainer.max_staleness:
        async_sampler = AsyncSampler(
            collector,
            sampler.generator,
            staleness=config.trainer.max_staleness,
            total_steps=schedule.total_steps,
            resumed=load_pending_steps(start, at, prompts.__getitem__) if start else (),
            ended=context.timeline.record,
        )
        context.stack.callback(async_sampler.close)
    return Sampling(sampler.generator, collector, async_sampler, validation, update)


def open_validation(context: TrainingContext, data: PromptData, sampler: Sampler) -> Validation | None:
    config, (_, sampling) = context.config, build_sampling(context.config)
    sets = build_validation(data.validation.prompts, data.validation.sources, sampling)
    shown, progress = config.trainer.val_generations_to_log, context.reporter.progress
    return Validation(sampler, sets, config.data.val_batch_size, shown, progress) if sets else None
