"""From a configuration to the objects of a run: which class plays which role is decided here and nowhere else."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from r1_cli import models
from r1_cli.config import RunConfig
from r1_cli.plugins import choose
from r1_cli.roles import Estimate, Schedule, Scorer
from r1_cli.samples import Group
from r1_core import advantages, losses
from r1_core.batching import Batching, MicroLimit
from r1_core.kl_control import AdaptiveKL, FixedKL, KLController
from r1_core.learner import Learner
from r1_core.objective import Objective
from r1_core.optim import build_optimizer, learning_rate_scale
from r1_data.dataset import PromptDataset
from r1_data.messages import Columns, compile_format_prompt
from r1_data.render import Renderer
from r1_data.sources import read_rows
from r1_data.stream import Stream
from r1_data.types import DataError
from r1_rewards.load import load as load_verifier
from r1_rewards.pool import PooledVerifier
from r1_rewards.types import Verifier
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")

Progress = Callable[[int, int], None]  # (done, in all)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def build_dataset(config: RunConfig, key: str, model: ModelFiles, progress: Progress | None = None) -> PromptDataset:
    """Read and check every row of the files that `data.<key>` names.

    Raises:
        DataError: names the key, and the rows that cannot be used.
    """
    data, files = config.data, getattr(config.data, key)
    try:
        dataset = PromptDataset(
            read_rows(files),
            build_renderer(config, model),
            max_prompt_length=data.max_prompt_length,
            filter_overlong=data.filter_overlong_prompts,
            columns=Columns(data.prompt_key, data.answer_key, data.image_key, data.video_key),
            explicit_columns=bool({"prompt_key", "answer_key"} & data.model_fields_set),
            format_prompt=compile_format_prompt(*_file(data.format_prompt)) if data.format_prompt else None,
            system_prompt=data.system_prompt,
            image_dir=data.image_dir,
            progress=progress,
        )
    except DataError as error:
        raise DataError(f"data.{key}={files}: {error}") from error
    if overlong := dataset.summary.overlong:
        message = "data.%s: %d of %d rows are left out, their prompts are over data.max_prompt_length=%d tokens"
        log.warning(message, key, overlong, dataset.summary.read, data.max_prompt_length)
    return dataset


def build_renderer(config: RunConfig, model: ModelFiles) -> Renderer:
    """Make the renderer that filter, engine and learner share."""
    template = config.data.override_chat_template
    return Renderer(
        model.processor,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        chat_template=_file(template)[0] if template else None,
        position_ids=models.position_ids_of(model.config),
    )


def _file(path: str) -> tuple[str, str]:
    return Path(path).read_text(encoding="utf-8"), path


def build_stream(config: RunConfig, size: int) -> Stream:
    """The order in which the prompts come; batches are what is generated at a time."""
    data = config.data
    batch = data.mini_rollout_batch_size or data.rollout_batch_size
    return Stream(size, batch, seed=data.seed, shuffle=data.shuffle)


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
    """Return a copy of the model for the engine. Processors compute in float32: half precision is slower there."""
    return load_weights(
        config, model, DTYPES[config.worker.rollout.dtype] if model.device.type == "cuda" else torch.float32
    )


def build_scorer(config: RunConfig, model: ModelFiles, weights: Any, verifier: Verifier) -> Scorer:
    """Make an engine of `weights`, which it takes over, and put the verifier beside it.

    Raises:
        ModelError: the engine cannot run this kind of model.
    """
    rollout = config.worker.rollout
    try:
        engine = EmbeddedEngine(
            weights,
            end_token_ids=models.end_token_ids(weights, model.tokenizer),
            banned_token_ids=models.media_token_ids(model.config, model.tokenizer),
            max_sequences=max(256, rollout.n, rollout.val_override_config.n),
            device=model.device,
        )
    except ValueError as error:
        raise models.ModelError(f"{model.path}: {error}") from error
    return Scorer(engine, verifier, model.tokenizer, config.worker.reward.skip_special_tokens)


def build_verifier(config: RunConfig) -> PooledVerifier:
    """Start the worker processes that score answers; the caller closes them."""
    reward = config.worker.reward
    return load_verifier(
        reward.reward_function or "",
        reward.reward_function_kwargs,
        timeout=reward.timeout,
        failure_score=reward.failure_score,
        workers=reward.num_cpus,
    )


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


def build_objective(config: RunConfig) -> Objective:
    """The loss that the learner descends.

    Clip widths mean something else in every loss: those that the user did not set are the loss's own.
    """
    actor, algorithm = config.worker.actor, config.algorithm
    settings = {
        "clip_low": ("clip_ratio_low", actor.clip_ratio_low),
        "clip_high": ("clip_ratio_high", actor.clip_ratio_high),
        "clip_dual": ("clip_ratio_dual", actor.clip_ratio_dual),
        "tau_pos": ("tau_positive", actor.tau_positive),
        "tau_neg": ("tau_negative", actor.tau_negative),
    }
    wanted = {name: value for name, (key, value) in settings.items() if key in actor.model_fields_set}
    return Objective(
        choose(losses.POLICY_LOSSES, actor.loss_type, wanted),
        aggregation=actor.loss_avg_mode,
        kl_penalty=algorithm.kl_penalty if algorithm.use_kl_loss and not algorithm.disable_kl else None,
        entropy_coef=actor.entropy_coef,
        length=config.data.max_response_length,
    )


def build_estimate(config: RunConfig) -> Estimate:
    """The function that gives samples their advantages, with the KL inside the reward if it is not in the loss."""
    algorithm = config.algorithm
    settings = {"gamma": algorithm.gamma, "lam": algorithm.lam}
    in_reward = not (algorithm.use_kl_loss or algorithm.disable_kl)
    return partial(
        advantages.assign,
        estimator=choose(advantages.ESTIMATORS, algorithm.adv_estimator, settings),
        kl_penalty=algorithm.kl_penalty if in_reward else None,
    )


def build_kl_controller(config: RunConfig) -> KLController:
    """How the weight of the KL term changes over the run."""
    algorithm = config.algorithm
    if algorithm.kl_type == "fixed" or algorithm.disable_kl:
        return FixedKL(algorithm.kl_coef)
    return AdaptiveKL(algorithm.kl_coef, algorithm.kl_target, int(algorithm.kl_horizon))


def build_baseline_sampling(config: RunConfig) -> SamplingParams | None:
    """How the answer is sampled that ReMax compares with: greedily (arXiv 2310.10505, section 4); None for others."""
    if config.algorithm.adv_estimator != "remax":
        return None
    return SamplingParams(max_tokens=config.data.max_response_length, temperature=0.0)


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


def build_filter(config: RunConfig) -> Callable[[Group], bool]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups all wrong or all right teach nothing."""
    algorithm = config.algorithm
    if not algorithm.online_filtering:
        return lambda group: True

    def keep(group: Group) -> bool:
        values = [score.parts.get(algorithm.filter_key, score.value) for score in group.scores]
        return algorithm.filter_low < sum(values) / len(values) < algorithm.filter_high

    return keep


def save_assets(model: ModelFiles, folder: Path) -> None:
    """Write configuration, tokenizer and processor, so that `folder` with weights is a whole Hugging Face model."""
    model.config.save_pretrained(folder)
    model.processor.save_pretrained(folder)
    generation = Path(model.path) / "generation_config.json"
    if generation.is_file():
        (folder / generation.name).write_bytes(generation.read_bytes())
