"""Build the learner of a run: policy, reference, optimizer, learning rate, micro-batches."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from r1_cli.build.adapter import AdaptedLearner, build_adaptation, open_adapters
from r1_cli.build.canary import draw_example, draw_pictures
from r1_cli.build.parameters import build_policy_optimizer, freeze, log_trained_parameters
from r1_cli.build.rendering import build_renderer
from r1_cli.config import RunConfig
from r1_cli.config.actor import OptimConfig, UpdateConfig
from r1_cli.config.root import Owner
from r1_cli.hardware import Hardware, dtype
from r1_cli.models import load as models
from r1_cli.models.files import ModelFiles, load_weights
from r1_cli.train.types import Schedule
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.offload import Offload
from r1_core.learner.optim import learning_rate_scale
from r1_core.learner.parallel import Parallel, Shard, reshard
from r1_core.types import Sample
from r1_data.references import Video
from r1_data.types import DataError, Example
from r1_rollout.routing import RoutingError, require_routing

if TYPE_CHECKING:
    from r1_core.learner.own_teacher import OwnTeacher

log = logging.getLogger("r1")


@contextmanager
def single_rank(hardware: Hardware) -> Iterator[Parallel]:
    """A mesh of one rank on a GPU, so that one rank runs the code of many. CPUs need no process group."""
    if not hardware.on_gpu:
        yield Parallel()
        return
    parallel = Parallel.single_process(hardware.kind)
    try:
        yield parallel
    finally:
        if dist.is_initialized():  # an engine in this process may have destroyed it
            dist.destroy_process_group()


def build_learner(
    config: RunConfig, hardware: Hardware, model: ModelFiles, schedule: Schedule, parallel: Parallel
) -> Learner:
    """Load the policy and, for a KL term, the frozen reference; build the optimizer.

    With a mesh in `parallel`, these are this rank's shards. An adapter's base stays in its computing precision and is
    also the reference.
    """
    actor = config.worker.actor
    steps = schedule.total_steps - schedule.critic_warmup
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    policy_shard, reference_shard = build_shards(config, hardware)
    adapters = open_adapters(config)
    kept = dtype(actor.kept_dtype) if adapters is None else computing
    policy = load_weights(config, model, kept, hardware.device, parallel, policy_shard, adapters)
    freeze(actor.model, policy)
    if actor.router_replay:
        refuse_unreplayable(policy, hardware)
    if actor.model.enable_gradient_checkpointing:
        models.enable_gradient_checkpointing(policy, on_host=actor.model.enable_activation_offload)
    reference = policy if adapters is not None and not config.algorithm.disable_kl else None
    if reference is None and not config.algorithm.disable_kl:
        # Never trained, so its computing precision is enough.
        reference = load_weights(config, model, computing, hardware.device, parallel, reference_shard)
    teacher = build_teacher(config, hardware, model, parallel, policy, computing, schedule.updates_per_step)
    optimizer = build_policy_optimizer(config, policy)
    if parallel.rank == 0:
        log_trained_parameters(policy, optimizer)
    make = Learner if adapters is None else partial(AdaptedLearner, adapters)
    return make(
        policy,
        optimizer,
        build_learning_rate(actor.optim, steps, schedule.updates_per_step),
        reference=reference,
        teacher=teacher,
        teacher_top=config.algorithm.distillation.topk or 0,
        batching=build_batching(config, actor),
        temperature=config.worker.rollout.temperature,
        max_grad_norm=actor.max_grad_norm,
        parallel=parallel,
        fillers=build_fillers(config, model) if parallel.data_world > 1 else (),
        device=hardware.device,
        offload=build_offload(config, hardware),
        adaptation=None
        if adapters is None
        else build_adaptation(adapters, policy, model.path, kept, actor.model.quantization),
    )


def refuse_unreplayable(policy: torch.nn.Module, hardware: Hardware) -> None:
    """Raise ModelError if the policy's routers cannot be replayed. All ranks must call this."""
    try:
        require_routing(policy, hardware.device)
    except RoutingError as error:
        raise models.ModelError(f"worker.actor.router_replay=true: {error}") from error
    reshard(policy)


def build_teacher(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    parallel: Parallel,
    policy: torch.nn.Module,
    dtype: torch.dtype,
    updates_per_step: int,
) -> "torch.nn.Module | OwnTeacher | None":
    """Return the learner's teacher: the policy itself if any source has that, or the first that is to be loaded."""
    if config.worker.teacher.is_policy:
        from r1_core.learner.own_teacher import OwnTeacher

        every, rate = config.algorithm.distillation.syncs
        return OwnTeacher(policy, every=every if every == 1 else every * updates_per_step, rate=rate)
    return load_teacher(config, hardware, model, parallel, dtype) if config.worker.teacher.in_learner else None


def load_teacher(
    config: RunConfig, hardware: Hardware, policy: ModelFiles, parallel: Parallel, dtype: torch.dtype
) -> torch.nn.Module:
    """Load the teacher beside the policy, sharded as the reference is. Raises ModelError if it does not fit."""
    from r1_cli.build.teacher_model import open_teacher

    settings, (_, shard) = config.worker.teacher, build_shards(config, hardware)
    files = open_teacher(settings, policy)
    return models.load_model(
        files.path,
        config=files.config,
        dtype=dtype,
        device=hardware.device,
        trust_remote_code=settings.model.trust_remote_code,
        parallel=parallel,
        shard=replace(shard, offload=settings.offload and hardware.on_gpu),
    )


def build_offload(config: RunConfig, hardware: Hardware) -> Offload:
    """Return what is offloaded between phases if others need the GPU's memory. A base that an engine shares stays."""
    actor, ref = config.worker.actor, config.worker.ref
    room_is_wanted = hardware.on_gpu and config.shares_devices and not actor.fsdp.enable_cpu_offload
    return Offload(
        weights=room_is_wanted and actor.offload.offload_params and not config.shares_base(on_gpu=hardware.on_gpu),
        optimizer=room_is_wanted and actor.offload.offload_optimizer,
        reference=hardware.on_gpu and ref.offload.offload_params and not ref.fsdp.enable_cpu_offload,
    )


def build_shards(config: RunConfig, hardware: Hardware) -> tuple[Shard, Shard]:
    ref = config.worker.ref.fsdp
    policy = build_shard(config.worker.actor, hardware)
    return policy, replace(policy, reshard=ref.enable_full_shard, offload=ref.enable_cpu_offload and hardware.on_gpu)


def build_shard(owner: UpdateConfig, hardware: Hardware) -> Shard:
    fsdp = owner.fsdp
    return Shard(
        param_dtype=hardware.computing_dtype(owner.kept_dtype, fsdp.mp_param_dtype),
        reduce_dtype=dtype(fsdp.mp_reduce_dtype),
        reshard=fsdp.enable_full_shard,
        # CPUs have no other memory to offload to.
        offload=fsdp.enable_cpu_offload and hardware.on_gpu,
    )


def build_learning_rate(optim: OptimConfig, steps: int, updates_per_step: int) -> Callable[[int], float]:
    """Return the learning-rate factor of each optimizer step. `steps` are those in which this model trains."""
    updates, warmup = steps * updates_per_step, optim.lr_warmup_steps
    return partial(
        learning_rate_scale,
        total_steps=updates,
        warmup_steps=int(optim.lr_warmup_ratio * updates) if warmup is None else warmup * updates_per_step,
        min_lr_ratio=optim.min_lr_ratio or 0.0,
        kind=optim.lr_scheduler_type,
        num_cycles=optim.num_cycles,
    )


def owner_settings(config: RunConfig, owner: Owner) -> UpdateConfig:
    return config.worker.actor if owner == "actor" else config.worker.critic


def build_batching(config: RunConfig, owner: UpdateConfig) -> Batching:
    """Return micro-batches limited by sequences, or if dynamic by the tokens of as many full sequences."""
    longest = config.data.max_prompt_length + config.data.max_response_length

    def limit(samples: int) -> MicroLimit:
        return MicroLimit(samples, samples * longest if owner.dynamic_batching else None)

    return Batching(
        padding_free=owner.padding_free,
        share_prompts=owner.shares_prompts,
        update=limit(owner.update_size),
        experience=limit(owner.experience_size),
    )


def build_fillers(config: RunConfig, model: ModelFiles) -> list[Sample]:
    """Return a tiny picture and a tiny video of two frames, if the model reads them, each with a word of text."""
    if not model.vision_language:
        return []
    renderer = build_renderer(config, model, own_sizes=True)
    content = [{"type": "video"}, {"type": "text", "text": "0"}]
    video = Example("filler:video", [{"role": "user", "content": content}], (Video(draw_pictures(0, 1)),), "")
    found = []
    for example in (draw_example(0), video):
        try:
            prompt = renderer.render(example)
        except DataError as error:
            log.debug("no tiny sample of %s: %s", example.id, error)
            continue
        nothing = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
        token_ids = torch.as_tensor(prompt.token_ids)
        found.append(Sample(token_ids, nothing, prompt.position_ids, 0, 0.0, prompt.model_inputs))
    return found
