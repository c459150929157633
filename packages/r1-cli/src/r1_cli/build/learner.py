"""From a configuration to the objects of a run: which class plays which role is decided here and nowhere else."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from r1_cli.models import load as models
from r1_cli.config import RunConfig
from r1_cli.config.availability import samples_with_vllm
from r1_cli.build.engines import build_engine
from r1_cli.build.rendering import media_settings
from r1_cli.models.precision import DTYPES, engine_dtype
from r1_cli.roles import Schedule, Scorer
from r1_cli.build.verifiers import DispatchingVerifier
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer, learning_rate_scale
from r1_data.render import Renderer
from r1_rollout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of the model before its weights are loaded."""

    path: str
    config: Any  # the Hugging Face configuration
    tokenizer: Any
    processor: Any  # the tokenizer itself for text models
    device: torch.device

    @property
    def vision_language(self) -> bool:
        return models.is_vision_language(self.config)


def open_model(config: RunConfig, path: str | None = None) -> ModelFiles:
    """Read the configuration and tokenizer of `path`, by default `worker.actor.model.model_path`."""
    settings = config.worker.actor.model
    path = path or settings.model_path or ""
    hf_config = models.load_config(
        path, trust_remote_code=settings.trust_remote_code, overrides=settings.override_config
    )
    tokenizer, processor = models.load_tokenizer(
        settings.tokenizer_path or path,
        vision_language=models.is_vision_language(hf_config),
        trust_remote_code=settings.trust_remote_code,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ModelFiles(path, hf_config, tokenizer, processor, device)


def build_renderer(config: RunConfig, model: ModelFiles) -> Renderer:
    """Make the renderer that filter, engine and learner share."""
    return Renderer(
        model.processor,
        **media_settings(config, model.processor),
        chat_template=_text(config.data.override_chat_template),
        chat_template_kwargs=config.data.chat_template_kwargs,
        position_ids=models.position_ids_of(model.config),
    )


def _text(template: str | None) -> str | None:
    """A template's text, where the file is named that holds it."""
    return Path(template).read_text(encoding="utf-8") if template and Path(template).is_file() else template


def load_weights(config: RunConfig, model: ModelFiles, dtype: torch.dtype) -> Any:
    """Return the model of `model.path` in `dtype` on its device."""
    return models.load_model(
        model.path,
        config=model.config,
        dtype=dtype,
        device=model.device,
        trust_remote_code=config.worker.actor.model.trust_remote_code,
    )


def load_engine_weights(config: RunConfig, model: ModelFiles) -> Any:
    """Return a copy of the model for the engine."""
    return load_weights(config, model, engine_dtype(config, model.device))


def build_scorer(
    config: RunConfig, model: ModelFiles, verifier: DispatchingVerifier, stack: ExitStack, weights: Any = None
) -> Scorer:
    """Make an engine, which ends with `stack`, and put the verifier beside it.

    Args:
        weights: a loaded model that the engine may take over; None: it is loaded here if the engine needs one.

    Raises:
        ModelError: the engine cannot run this kind of model, or cannot start.
    """
    if weights is None and not samples_with_vllm(config):
        weights = load_engine_weights(config, model)
    engine = build_engine(config, model, weights, stack)
    return Scorer(engine, verifier, model.tokenizer, verifier.alone, config.worker.reward.skip_special_tokens)


def build_learner(config: RunConfig, model: ModelFiles, schedule: Schedule) -> Learner:
    """Load the policy, and the frozen reference if there is a KL term, and make the optimizer."""
    actor = config.worker.actor
    dtype = DTYPES[actor.kept_dtype]
    policy = load_weights(config, model, dtype)
    if actor.model.freeze_vision_tower:
        models.freeze_vision(policy)
    if actor.model.enable_gradient_checkpointing:
        models.enable_gradient_checkpointing(policy)
    optimizer = build_optimizer(
        policy.named_parameters(),
        lr=actor.optim.lr,
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        strategy=actor.optim.strategy,
    )
    updates = schedule.total_steps * schedule.updates_per_step
    warmup = actor.optim.lr_warmup_steps
    rate = partial(
        learning_rate_scale,
        total_steps=updates,
        warmup_steps=int(actor.optim.lr_warmup_ratio * updates) if warmup is None else warmup,
        min_lr_ratio=actor.optim.min_lr_ratio or 0.0,
        kind=actor.optim.lr_scheduler_type,
        num_cycles=actor.optim.num_cycles,
    )
    return Learner(
        policy,
        optimizer,
        rate,
        reference=None if config.algorithm.disable_kl else load_weights(config, model, dtype),
        batching=build_batching(config),
        temperature=config.worker.rollout.temperature,
        max_grad_norm=actor.max_grad_norm,
        # Mixed precision is a matter of GPUs: processors of today's CPUs are slower in half precision than in single.
        autocast=torch.bfloat16 if model.device.type == "cuda" and actor.fsdp.mp_param_dtype == "bf16" else None,
    )


def build_batching(config: RunConfig) -> Batching:
    """Micro-batches by sequences, or with dynamic batching by the tokens that so many full sequences would have."""
    actor, longest = config.worker.actor, config.data.max_prompt_length + config.data.max_response_length

    def limit(samples: int) -> MicroLimit:
        return MicroLimit(samples, samples * longest if actor.dynamic_batching else None)

    return Batching(
        padding_free=actor.padding_free,
        update=limit(actor.micro_batch_size_per_device_for_update),
        experience=limit(actor.micro_batch_size_per_device_for_experience),
    )


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


def save_assets(model: ModelFiles, folder: Path) -> None:
    """Write configuration, tokenizer and processor, so that `folder` with weights is a whole Hugging Face model."""
    model.config.save_pretrained(folder)
    model.processor.save_pretrained(folder)
    generation = Path(model.path) / "generation_config.json"
    if generation.is_file():
        (folder / generation.name).write_bytes(generation.read_bytes())
