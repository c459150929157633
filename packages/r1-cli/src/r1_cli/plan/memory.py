"""How much memory a model's states take, read off the headers of its safetensors files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from r1_cli.config import RunConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_STATES = {"adamw": 2, "adamw_bf16": 3}  # values kept per trained weight
LARGEST_HEADER = 1 << 27


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device. Activations and the engine's cache come on top."""

    parameters: int  # a count, not bytes
    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference + self.engine


def estimate(config: RunConfig) -> Memory | None:
    """Return what the run's copies of the model take, None unless the model is a local folder of safetensors."""
    actor, rollout = config.worker.actor, config.worker.rollout
    sizes = dict(_tensor_sizes(Path(actor.model.model_path))) if actor.model.model_path else {}
    if not sizes or actor.model.lora.rank:
        return None
    parameters = sum(sizes.values())
    frozen = sum(n for name, n in sizes.items() if "visual." in name) if actor.model.freeze_vision_tower else 0
    trained = parameters - frozen
    kept = BYTES[actor.kept_dtype]
    devices = config.trainer.devices
    accumulates = actor.global_batch_size * rollout.n > config.data_ranks * actor.micro_batch_size_per_device_for_update
    # Gradients in half precision are added up in float32 (`r1_core.learner.gradient_sums`).
    gradient = kept + BYTES["fp32"] if kept < BYTES["fp32"] and accumulates else kept
    shards = devices if actor.fsdp.enable_full_shard else 1
    reference = min(kept, BYTES[actor.fsdp.mp_param_dtype])  # in what it computes with, on a GPU
    has_reference = not config.algorithm.disable_kl
    sampling = parameters * BYTES[rollout.dtype] // (rollout.engine_size if config.on_cluster else 1)
    return Memory(
        parameters=parameters,
        weights=parameters * kept // shards,
        gradients=trained * gradient // shards,
        optimizer=trained * kept * OPTIMIZER_STATES[actor.optim.strategy] // shards,
        reference=parameters * reference // shards if has_reference else 0,
        engine=sampling if config.colocated else 0,
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
