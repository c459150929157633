"""Build the engine of a run, its sampling parameters, and the sampler that scores responses."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from r1_cli.build.algorithm import build_shaping
from r1_cli.build.engines import EngineSetup
from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_cli.config import RunConfig
from r1_cli.config.rollout import engine_module
from r1_cli.config.sources import validation_sources
from r1_cli.hardware import Hardware
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, load_weights
from r1_cli.train.recorder import Recorder
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.types import Progress, PromptStream, Sampler, Update
from r1_data.dataset import Mixture
from r1_data.render import Renderer
from r1_rewards.types import Verifier
from r1_rollout.errors import EngineError
from r1_rollout.tokens import end_token_ids, media_token_ids
from r1_rollout.types import Generator, SamplingParams, accept_old_names

if TYPE_CHECKING:
    from r1_cli.train.episodes.agents import Player


def open_player(
    config: RunConfig, model: ModelFiles, renderer: Renderer, stack: ExitStack, recorded: Path | None = None
) -> "Player | None":
    """Open what plays the episodes of a multi-turn run; None for single responses. Raises as `episodes.open_player`."""
    if not config.worker.rollout.multi_turn.enable:
        return None
    from r1_cli.build import episodes

    return episodes.open_player(config, model, renderer, stack, recorded)


def with_record(player: "Player | None", recorder: Recorder) -> "Player | None":
    """Return the player so that it records what environments and agents answer, unless it repeats a record."""
    if player is None:
        return None
    from r1_cli.train.episodes.agents import AgentPlayer
    from r1_cli.train.episodes.recorded_agents import record_agents
    from r1_cli.train.episodes.recorded_environments import RecordedEnvironments, record_answers

    if isinstance(player.environments, RecordedEnvironments):
        return player
    if isinstance(player, AgentPlayer):
        return replace(player, agents=record_agents(player.agents, player.environments.kinds, recorder))
    return replace(player, answers=record_answers(recorder))


def build_sampler(
    config: RunConfig,
    model: ModelFiles,
    verifier: DispatchingVerifier,
    engine: Generator,
    player: "Player | None" = None,
) -> Sampler:
    """`player` plays episodes with the engine; None: single responses."""
    plain, judge = config.worker.reward.skip_special_tokens, cast("Verifier", verifier)
    if player is not None:
        from r1_cli.build.episodes import episode_verifier

        judge = episode_verifier(config, verifier)
    return Sampler(
        engine,
        judge,
        model.tokenizer,
        verifier.per_sample,
        plain,
        verifier.truth_problem,
        play=player.generate if player else None,
        engine_use=player.use.metrics if player else dict,
    )


def load_engine_weights(config: RunConfig, hardware: Hardware, model: ModelFiles) -> Any:
    return load_weights(config, model, hardware.engine_dtype(config.worker.rollout.dtype), hardware.device)


def build_engine(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    load: Callable[[], Any],
    stack: ExitStack,
    *,
    read_only: bool = False,
) -> Generator:
    """Build the engine of `worker.rollout`.

    Args:
        load: returns a model that the engine may take over.
        read_only: the engine shares the learner's weights.

    Raises:
        ModelError: the engine cannot run this kind of model, or cannot start.
    """
    ends = end_token_ids(models.load_generation_config(model.path, model.config), model.config, model.tokenizer)
    banned = media_token_ids(model.config, model.tokenizer)
    setup = EngineSetup(config, hardware, model, ends, banned, max_sequences(config), load, read_only)
    try:
        engine: Generator = accept_old_names(engine_module(config.worker.rollout.engine).open_engine(setup, stack))
        return engine
    except models.ModelError:
        raise
    except EngineError as error:
        raise models.ModelError(str(error)) from error
    except ValueError as error:
        raise models.ModelError(f"{model.path}: {error}") from error


def max_sequences(config: RunConfig) -> int:
    """Return how many samples decode at the same time: at least a whole group."""
    rollout = config.worker.rollout
    return max(rollout.n, rollout.val_override_config.n, *(s.n or 1 for s in validation_sources(config.data)), 256)


def build_sampling(config: RunConfig) -> tuple[SamplingParams, SamplingParams]:
    rollout = config.worker.rollout
    training = SamplingParams(
        n=rollout.n,
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )
    override = {k: v for k, v in rollout.val_override_config.model_dump().items() if v is not None}
    return training, replace(training, **override)


def build_collector(
    config: RunConfig,
    prompts: Mixture,
    stream: PromptStream,
    sampling: SamplingParams,
    sampler: Sampler,
    update: Update,
    progress: Progress,
    rates: Sequence[float] | None = None,
) -> DynamicSampling:
    """`rates` are the pass rates that a curriculum read, by row."""
    trainer, settings = config.trainer, config.algorithm
    return DynamicSampling(
        sampler=sampler,
        dataset=prompts,
        stream=stream,
        sampling=sampling,
        baselines="baselines" in update.needs,
        shaping=build_shaping(config),
        filter_key=settings.filter_key if settings.online_filtering else "overall",
        groups=config.data.rollout_batch_size,
        max_batches=trainer.max_try_make_batch,
        # Groups that wait are as much older than others as they have waited.
        surplus_max_age=settings.surplus_max_age + trainer.max_staleness,
        max_prompt_length=config.data.max_prompt_length,
        progress=progress,
        rates=rates,
    )
