"""Load learner, critic and engine of a run, check them, and load the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from r1_cli.build.algorithm import build_start
from r1_cli.build.packing import choose_layout
from r1_cli.build.profiling import choose_micro_batches
from r1_cli.checkpoint.folders import read_state
from r1_cli.config import RunConfig
from r1_cli.jobs.context import TrainingContext
from r1_cli.jobs.data import Data
from r1_cli.jobs.engines import open_engine, open_engine_in_process, open_engine_on_base
from r1_cli.jobs.learner import prepare_learner
from r1_cli.jobs.resume import find_previous_sizes, load_start
from r1_cli.runs.reader import RunReader
from r1_cli.train.types import Policy, Position, Schedule, ValueModel
from r1_rollout.types import Generator


@dataclass(frozen=True, slots=True)
class Trained:
    learner: Policy
    critic: ValueModel | None


@dataclass(frozen=True, slots=True)
class Models(Trained):
    engine: Generator


def load_models(context: TrainingContext, schedule: Schedule) -> Models:
    """Load learner, critic and engine. Raises ModelError or ClusterError."""
    load = prepare_trained(context, schedule)
    if context.config.shares_base(on_gpu=context.hardware.on_gpu):
        trained = load()
        return Models(trained.learner, trained.critic, load_engine(context, trained.learner))
    # Before the learner's weights are on the devices: vLLM claims a share of what is free.
    engine = load_engine(context, None)
    trained = load()
    return Models(trained.learner, trained.critic, engine)


def prepare_trained(context: TrainingContext, schedule: Schedule) -> Callable[[], Trained]:
    """Return what loads learner and critic, as `prepare_learner` does."""
    context.folder.end_phase("data")
    load = prepare_learner(
        context.config, context.hardware, context.model, schedule, context.placement.ranks, context.ranks, context.stack
    )
    return lambda: Trained(*load())


def load_engine(context: TrainingContext, learner: Policy | None) -> Generator:
    """`learner` gives the base of an adapter if the engine shares it."""
    config, hardware, model, stack = context.config, context.hardware, context.model, context.stack
    if config.shares_base(on_gpu=hardware.on_gpu):
        return open_engine_on_base(learner, config, hardware, model, stack)
    if context.engine_process is not None:
        return open_engine_in_process(config, hardware, context.engine_process)
    return open_engine(config, hardware, model, context.placement.engines, context.engines, stack)


def check_models(
    context: TrainingContext, data: Data, models: Trained, recorded: RunConfig | None = None
) -> tuple[TrainingContext, dict[str, int]]:
    """Choose correct batch layouts and micro-batch sizes that fit; return the context with them, and the sizes by key.

    Args:
        recorded: the configuration as `open_logs` records it, if it is another.

    Raises:
        ConfigError: a setting needs a wrong layout, or a size does not fit into memory.
    """
    config, hardware, model, start = context.config, context.hardware, context.model, context.folder.start
    context.folder.end_phase("models")
    # Tools and environments may show pictures later.
    shown = any(part.has_media for part in data.parts) or config.worker.rollout.multi_turn.enable
    choose_layout(config, hardware, model, data.renderer, models.learner, models.critic, pictures=shown)
    if start:
        chosen = read_state(start).get("micro_batches", {})
    else:
        chosen = find_previous_sizes(RunReader(context.folder.path).starts(), recorded or config, context.devices)
    pictures = any(part.has_media for part in data.training.prompts.parts)
    config, sizes = choose_micro_batches(
        config, hardware, model, data.renderer, models.learner, models.critic, chosen, pictures=pictures
    )
    context.folder.end_phase("checks")
    return replace(context, config=config), sizes


def resume(context: TrainingContext, data: Data, models: Trained, micro_batches: Mapping[str, int]) -> Position:
    """Load the checkpoint, if any, and return the position. Raises CheckpointError if it does not fit."""
    begin = build_start(context.config)
    at = load_start(models.learner, models.critic, data.training.prompts, context.folder.start, begin)
    context.folder.end_phase("checkpoint")
    return replace(at, micro_batches=micro_batches)
