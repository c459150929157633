"""Build the engine of a run, its sampling parameters, and the sampler that scores responses."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from r1_cli.build.engines import EngineSetup
from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_cli.config import RunConfig
from r1_cli.config.rollout import engine_module
from r1_cli.config.sources import validation_sources
from r1_cli.hardware import Hardware
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, load_weights
from r1_cli.train.types import Sampler
from r1_rollout.errors import EngineError
from r1_rollout.tokens import end_token_ids, media_token_ids
from r1_rollout.types import Generator, SamplingParams, accept_old_names


def build_sampler(config: RunConfig, model: ModelFiles, verifier: DispatchingVerifier, engine: Generator) -> Sampler:
    plain = config.worker.reward.skip_special_tokens
    return Sampler(engine, verifier, model.tokenizer, verifier.per_sample, plain, verifier.truth_problem)


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
