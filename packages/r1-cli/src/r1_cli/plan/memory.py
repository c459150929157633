"""How much memory a model's states take, read off the headers of its safetensors files."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from r1_cli.config import RunConfig
from r1_cli.config.worker import UpdateConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_STATES = {"adamw": 2, "adamw_bf16": 3}  # values kept per trained weight
LARGEST_HEADER = 1 << 27


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a model that is trained, on one device."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device. Activations and the engine's cache come on top."""

    parameters: int  # a count, not bytes
    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine: int
    critic: States | None = None

    @property
    def total(self) -> int:
        actor = self.weights + self.gradients + self.optimizer
        return actor + self.reference + self.engine + (self.critic.total if self.critic else 0)


def estimate(config: RunConfig) -> Memory | None:
    """Return what the run's copies of the model take, None unless the model is a local folder of safetensors."""
    actor, rollout = config.worker.actor, config.worker.rollout
    sizes = dict(_tensor_sizes(Path(actor.model.model_path))) if actor.model.model_path else {}
    if not sizes or actor.model.lora.rank:
        return None
    parameters, devices = sum(sizes.values()), config.trainer.devices
    policy = estimate_states(config, actor, sizes, config.data_ranks)
    shards = devices if actor.fsdp.enable_full_shard else 1
    reference = min(BYTES[actor.kept_dtype], BYTES[actor.fsdp.mp_param_dtype])  # in what it computes with, on a GPU
    has_reference = not config.algorithm.disable_kl
    return Memory(
        parameters=parameters,
        weights=policy.weights,
        gradients=policy.gradients,
        optimizer=policy.optimizer,
        reference=parameters * reference // shards if has_reference else 0,
        engine=parameters * BYTES[rollout.dtype] // min(devices, rollout.tensor_parallel_size),
        critic=estimate_critic(config),
    )


def estimate_critic(config: RunConfig) -> States | None:
    """Return what the critic takes, None without one, or if its model is not in a local folder."""
    critic = config.worker.critic
    if not config.has_critic or not critic.model.model_path:
        return None
    sizes = {name: n for name, n in _tensor_sizes(Path(critic.model.model_path)) if name != "lm_head.weight"}
    return estimate_states(config, critic, sizes, config.trainer.devices) if sizes else None


def estimate_states(config: RunConfig, owner: UpdateConfig, sizes: Mapping[str, int], shares: int) -> States:
    """Return what a model of tensors of these sizes takes, trained as `owner` says on so many shares of a step."""
    parameters, devices = sum(sizes.values()), config.trainer.devices
    frozen = sum(n for name, n in sizes.items() if "visual." in name) if owner.model.freeze_vision_tower else 0
    trained, kept = parameters - frozen, BYTES[owner.kept_dtype]
    sequences = owner.global_batch_size * config.worker.rollout.n
    accumulates = sequences > shares * owner.micro_batch_size_per_device_for_update
    # Gradients in half precision are added up in float32 (`r1_core.learner.gradient_sums`).
    gradient = kept + BYTES["fp32"] if kept < BYTES["fp32"] and accumulates else kept
    shards = devices if owner.fsdp.enable_full_shard else 1
    return States(
        weights=parameters * kept // shards,
        gradients=trained * gradient // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[owner.optim.strategy] // shards,
    )


def _tensor_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, number of values) of the model's tensors in the folder; what is not safetensors is passed over.

    A checkpoint of r1 has the optimizer's beside them.
    """
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        if file.name.startswith("optimizer"):
            continue
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length) if length < LARGEST_HEADER else b""
        try:
            tensors = json.loads(header)
        except ValueError:
            continue
        for name, entry in tensors.items():
            if name != "__metadata__":
                yield name, prod(entry["shape"])
