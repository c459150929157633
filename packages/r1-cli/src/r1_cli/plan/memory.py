"""Bytes of a run's models on one device: weights, gradients, optimizer states."""

from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

from r1_cli.config import RunConfig
from r1_cli.config.actor import UpdateConfig
from r1_cli.config.root import Owner
from r1_cli.config.section import Tree
from r1_cli.plan.model_sizes import BYTES, Models, read_models, read_shapes

OPTIMIZER_STATES = {"adamw": 2, "adamw_bf16": 3}  # values kept per trained weight
FOUR_BITS = 0.52  # bytes of a linear layer's weight, with its share of a scale for each 64


@dataclass(frozen=True, slots=True)
class States:
    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, without activations and the engine's cache."""

    models: Models
    parameters: int  # a count, not bytes
    trained: int  # likewise
    saved: int  # of the weights in a checkpoint, over all devices
    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine: int
    teacher: int = 0  # that the learner holds
    other_teachers: int = 0  # in the main process
    critic: States | None = None

    @property
    def total(self) -> int:
        actor = self.weights + self.gradients + self.optimizer
        teachers = self.teacher + self.other_teachers
        return actor + self.reference + teachers + self.engine + (self.critic.total if self.critic else 0)

    def as_json(self) -> Tree:
        figures = asdict(replace(self, models={}))
        del figures["models"]
        return figures


def estimate(config: RunConfig, models: Models | None = None) -> Memory | None:
    """Return the memory of the run's models (None: read their folders), None without the actor's sizes."""
    models = read_models(config) if models is None else models
    if "actor" not in models:
        return None
    sizes, actor, rollout = models["actor"], config.worker.actor, config.worker.rollout
    lora, parameters, trained = actor.model.lora, sizes.parameters, sizes.count_trained(actor.model)
    frozen = compute_bytes(actor)  # in what it computes with, on a GPU
    kept = BYTES["fp32"] if lora.used else BYTES[actor.kept_dtype]
    factors = BYTES["fp32"] * trained if lora.used else 0
    packed = sizes.linear if actor.model.quantization else 0
    base = int(packed * FOUR_BITS) + (parameters - packed) * frozen
    shards = config.shard_ranks
    has_reference = not config.algorithm.disable_kl and not lora.used  # which is the base under an adapter
    weights = base + factors if lora.used else parameters * kept
    # An engine that samples from the learner's own base has copies of the factors only.
    sampled = trained if config.shares_base(on_gpu=True) else parameters
    sampling = sampled * BYTES[rollout.dtype] // (rollout.engine_size if config.on_cluster else 1)
    return Memory(
        models=models,
        parameters=parameters,
        trained=trained,
        saved=factors or parameters * kept,
        weights=weights // shards,
        gradients=trained * _gradient_bytes(config, "actor", kept) // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[actor.optim.strategy] // shards,
        reference=parameters * frozen // shards if has_reference else 0,
        engine=sampling if config.colocated else 0,
        teacher=_estimate_teacher(config, parameters, trained, kept) // shards,
        other_teachers=sum(_bytes_of(config, path, parameters) for path in config.worker.teacher.in_main_process),
        critic=_estimate_critic(config, models),
    )


def _estimate_teacher(config: RunConfig, actors: int, trained: int, kept: int) -> int:
    """Return the bytes of the teacher that the learner holds."""
    if config.worker.teacher.is_policy:
        every, rate = config.algorithm.distillation.syncs
        return 0 if every == 1 else trained * (BYTES["fp32"] if rate else kept)
    path = config.worker.teacher.in_learner
    return _bytes_of(config, path, actors) if path else 0


def _bytes_of(config: RunConfig, path: str, actors: int) -> int:
    """Return the bytes of a teacher's weights; a hub model counts as large as the actor, of `actors` weights."""
    weights = sum(prod(shape) for _, shape in read_shapes(Path(path))) or actors
    return weights * compute_bytes(config.worker.actor)


def _estimate_critic(config: RunConfig, models: Models) -> States | None:
    critic = config.worker.critic
    if not config.has_critic or "critic" not in models:
        return None
    sizes = models["critic"]
    parameters, trained = sizes.parameters, sizes.count_trained(critic.model)
    kept, shards = BYTES[critic.kept_dtype], config.shard_ranks
    return States(
        weights=parameters * kept // shards,
        gradients=trained * _gradient_bytes(config, "critic", kept) // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[critic.optim.strategy] // shards,
    )


def _gradient_bytes(config: RunConfig, owner: Owner, kept: int) -> int:
    """Return the bytes of one gradient; half precision accumulates in float32 (`learner.gradient_sums`)."""
    section = config.trained(owner)
    at_once = config.data_ranks(owner) * section.update_size
    accumulates = section.global_batch_size * config.worker.rollout.n > at_once
    return kept + BYTES["fp32"] if kept < BYTES["fp32"] and accumulates else kept


def compute_bytes(section: UpdateConfig) -> int:
    """Return the bytes of one number in a forward pass on a GPU."""
    return min(BYTES[section.kept_dtype], BYTES[section.fsdp.mp_param_dtype])
