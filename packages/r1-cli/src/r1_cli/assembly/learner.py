"""The learner of a run: policy, reference, optimizer, learning rate, micro-batches."""

from collections.abc import Callable
from functools import partial

import torch

from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware, dtype
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, load_weights
from r1_cli.roles import Schedule
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer, learning_rate_scale
from r1_core.learner.parallel import Parallel


def build_learner(
    config: RunConfig, hardware: Hardware, model: ModelFiles, schedule: Schedule, parallel: Parallel | None = None
) -> Learner:
    """Load the policy, and the frozen reference if there is a KL term, and make the optimizer.

    With `parallel` these are this rank's shares of them.
    """
    actor = config.worker.actor
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    policy = load_weights(config, model, dtype(actor.kept_dtype), hardware.device, computing, parallel)
    if actor.model.freeze_vision_tower:
        models.freeze_vision(policy)
    if actor.model.enable_gradient_checkpointing:
        models.enable_gradient_checkpointing(policy)
    reference = None
    if not config.algorithm.disable_kl:
        # Never trained, so it needs no more digits than it computes with.
        reference = load_weights(config, model, computing, hardware.device, computing, parallel)
    optimizer = build_optimizer(
        policy.named_parameters(),
        lr=actor.optim.lr,
        betas=actor.optim.betas,
        weight_decay=actor.optim.weight_decay,
        strategy=actor.optim.strategy,
    )
    return Learner(
        policy,
        optimizer,
        build_learning_rate(config, schedule),
        reference=reference,
        batching=build_batching(config),
        temperature=config.worker.rollout.temperature,
        max_grad_norm=actor.max_grad_norm,
        parallel=parallel,
        # Mixed precision is a matter of GPUs: processors of today's CPUs are slower in half precision than in single.
        autocast=torch.bfloat16 if hardware.on_gpu and actor.fsdp.mp_param_dtype == "bf16" else None,
        device=hardware.device,
    )


def build_learning_rate(config: RunConfig, schedule: Schedule) -> Callable[[int], float]:
    """The factor on the learning rate at each optimizer step; the warm-up is given in steps, of which each has some."""
    optim, updates = config.worker.actor.optim, schedule.total_steps * schedule.updates_per_step
    warmup = optim.lr_warmup_steps
    return partial(
        learning_rate_scale,
        total_steps=updates,
        warmup_steps=int(optim.lr_warmup_ratio * updates) if warmup is None else warmup * schedule.updates_per_step,
        min_lr_ratio=optim.min_lr_ratio or 0.0,
        kind=optim.lr_scheduler_type,
        num_cycles=optim.num_cycles,
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
