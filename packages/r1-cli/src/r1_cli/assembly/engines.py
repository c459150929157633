"""Which engine samples, and how it is made from a configuration."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from r1_cli.assembly.servers import build_server_pool
from r1_cli.assembly.verifiers import DispatchingVerifier
from r1_cli.config import RunConfig
from r1_cli.config.availability import samples_with_vllm
from r1_cli.config.sources import validation_sources
from r1_cli.hardware import Hardware
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, load_weights
from r1_cli.roles import Scorer
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import EngineError
from r1_rollout.types import Generator, SamplingParams
from r1_rollout.vllm.engine import VllmEngine


def build_scorer(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    verifier: DispatchingVerifier,
    stack: ExitStack,
    weights: Any = None,
) -> Scorer:
    """Make an engine, which ends with `stack`, and put the verifier beside it.

    Args:
        weights: a loaded model that the engine may take over; None: it is loaded here if the engine needs one.

    Raises:
        ModelError: the engine cannot run this kind of model, or cannot start.
    """
    if weights is None and not samples_with_vllm(config):
        weights = load_engine_weights(config, hardware, model)
    engine = build_engine(config, hardware, model, weights, stack)
    return Scorer(engine, verifier, model.tokenizer, verifier.per_sample, config.worker.reward.skip_special_tokens)


def load_engine_weights(config: RunConfig, hardware: Hardware, model: ModelFiles) -> Any:
    """Return a copy of the model for the engine."""
    return load_weights(config, model, hardware.engine_dtype(config.worker.rollout.dtype), hardware.device)


def build_engine(config: RunConfig, hardware: Hardware, model: ModelFiles, weights: Any, stack: ExitStack) -> Generator:
    """Make the engine that `worker.rollout.name` asks for; it ends with `stack`.

    Args:
        weights: a loaded model. The embedded engine takes it over; None will do for vLLM.

    Raises:
        ModelError: the engine cannot run this kind of model, or cannot start.
    """
    ends = models.end_token_ids(models.load_generation_config(model.path, model.config), model.tokenizer)
    banned = models.media_token_ids(model.config, model.tokenizer)
    if config.worker.rollout.servers.used:
        return stack.enter_context(build_server_pool(config, hardware, model, ends, max_sequences(config)))
    try:
        if samples_with_vllm(config):
            engine = VllmEngine.load(model.path, end_token_ids=ends, **vllm_options(config, hardware, model, banned))
            stack.callback(engine.close)
            return engine
        return EmbeddedEngine(
            weights,
            end_token_ids=ends,
            banned_token_ids=banned,
            max_sequences=max_sequences(config),
            device=hardware.device,
        )
    except ValueError as error:
        raise models.ModelError(f"{model.path}: {error}") from error
    except EngineError as error:
        raise models.ModelError(str(error)) from error


def max_sequences(config: RunConfig) -> int:
    """How many samples decode at the same time: a whole group at least."""
    rollout = config.worker.rollout
    return max(rollout.n, rollout.val_override_config.n, *(s.n or 1 for s in validation_sources(config.data)), 256)


def vllm_options(config: RunConfig, hardware: Hardware, model: ModelFiles, banned: frozenset[int]) -> dict[str, Any]:
    """Return the keys of `worker.rollout` as `r1_rollout.vllm.options.EngineOptions` names them."""
    rollout, data, settings = config.worker.rollout, config.data, config.worker.actor.model
    return {
        "banned_token_ids": banned,
        "dtype": str(hardware.engine_dtype(rollout.dtype)).removeprefix("torch."),
        "tokenizer": settings.tokenizer_path,
        "hf_overrides": dict(settings.override_config),
        "trust_remote_code": settings.trust_remote_code,
        "dummy_weights": True,
        "tensor_parallel_size": min(rollout.tensor_parallel_size, config.trainer.devices),
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_model_len": rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_sequences": max_sequences(config),
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "limit_images": rollout.limit_images,
        "pixels": {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels} if model.vision_language else {},
        "log_stats": not rollout.disable_log_stats,
    }


def build_sampling(config: RunConfig) -> tuple[SamplingParams, SamplingParams]:
    """Sampling for training and for validation, which overrides what `val_override_config` sets."""
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
