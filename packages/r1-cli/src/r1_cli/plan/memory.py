"""How much memory a model's states take, read off the headers of its safetensors files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from r1_cli.config import RunConfig
from r1_cli.plan.trained import count_trained

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_STATES = {"adamw": 2, "adamw_bf16": 3}  # values kept per trained weight
FOUR_BITS = 0.52  # bytes a weight, with its share of a scale for each 64; what stays whole is left out
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
    trained: int  # likewise
    saved: int  # of the weights in a checkpoint, over all devices
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
    lora = actor.model.lora
    shapes = dict(read_shapes(Path(actor.model.model_path))) if actor.model.model_path else {}
    if not shapes:
        return None
    parameters = sum(map(prod, shapes.values()))
    trained = count_trained(actor.model, shapes, dict(read_shapes(Path(lora.path))) if lora.path else {})
    frozen = min(BYTES[actor.kept_dtype], BYTES[actor.fsdp.mp_param_dtype])  # in what it computes with, on a GPU
    kept = BYTES["fp32"] if lora.used else BYTES[actor.kept_dtype]
    factors = BYTES["fp32"] * trained if lora.used else 0
    in_base = FOUR_BITS if actor.model.quantization else frozen
    at_once = config.data_ranks() * actor.update_size
    accumulates = actor.global_batch_size * rollout.n > at_once
    # Gradients in half precision are added up in float32 (`r1_core.learner.passes`).
    gradient = kept + BYTES["fp32"] if kept < BYTES["fp32"] and accumulates else kept
    shards = config.shard_ranks
    has_reference = not config.algorithm.disable_kl and not lora.used  # which is the base under an adapter
    weights = int(parameters * in_base) + factors if lora.used else parameters * kept
    # An engine that samples from the learner's own base has copies of the factors only.
    sampled = trained if config.shares_base(on_gpu=True) else parameters
    sampling = sampled * BYTES[rollout.dtype] // (rollout.engine_size if config.on_cluster else 1)
    return Memory(
        parameters=parameters,
        trained=trained,
        saved=factors or parameters * kept,
        weights=weights // shards,
        gradients=trained * gradient // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[actor.optim.strategy] // shards,
        reference=parameters * frozen // shards if has_reference else 0,
        engine=sampling if config.colocated else 0,
        critic=estimate_critic(config),
    )


def estimate_critic(config: RunConfig) -> States | None:
    """Return what the critic takes, None without one, or if its model is not in a local folder."""
    critic = config.worker.critic
    if not config.has_critic or not critic.model.model_path:
        return None
    shapes = {name: shape for name, shape in read_shapes(Path(critic.model.model_path)) if name != "lm_head.weight"}
    parameters, trained = sum(map(prod, shapes.values())), count_trained(critic.model, shapes, {})
    if not parameters:
        return None
    kept = BYTES[critic.kept_dtype]
    sequences = critic.global_batch_size * config.worker.rollout.n
    accumulates = sequences > config.data_ranks("critic") * critic.update_size
    gradient = kept + BYTES["fp32"] if kept < BYTES["fp32"] and accumulates else kept
    shards = config.shard_ranks
    return States(
        weights=parameters * kept // shards,
        gradients=trained * gradient // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[critic.optim.strategy] // shards,
    )


def read_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the model's tensors in the folder; what is not safetensors is passed over.

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
                yield name, tuple(entry["shape"])
