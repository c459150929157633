"""How many bytes of a GPU each phase of a step takes, as states leave it and come back between phases."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.config.actor import UpdateConfig
from r1_cli.config.rollout import engine_module
from r1_cli.config.root import Owner
from r1_cli.plan.activations import (
    Tower,
    activation_bytes,
    cache_bytes,
    chunk_bytes,
    read_sizes,
    read_tower,
    tower_bytes,
)
from r1_cli.plan.cuts import count_micro_batch_tokens
from r1_cli.plan.gathers import gathered_bytes
from r1_cli.plan.memory import BYTES, Memory, estimate, read_shapes

CONTEXT = 1 << 30  # bytes that CUDA, its libraries and fragments take of a GPU, about; an engine beside has its own
SEQUENCES = 256  # that decode at the same time in an engine (`assembly.engines.max_sequences`)
# What can be set so that less is on the GPU at once, the cheapest first.
REMEDIES: tuple[tuple[str, Any], ...] = (
    ("worker.ref.fsdp.enable_cpu_offload", True),
    ("worker.actor.offload.offload_optimizer", True),
    ("worker.actor.offload.offload_params", True),
    ("worker.critic.offload.offload_optimizer", True),
    ("worker.critic.offload.offload_params", True),
    ("worker.actor.model.enable_gradient_checkpointing", True),
    ("worker.actor.micro_batch_size_per_device_for_update", 1),
    ("worker.actor.model.enable_activation_offload", True),
    ("worker.critic.model.enable_gradient_checkpointing", True),
    ("worker.critic.micro_batch_size_per_device_for_update", 1),
    ("worker.critic.model.enable_activation_offload", True),
    ("worker.rollout.gpu_memory_utilization", 0.5),
    ("worker.actor.optim.strategy", "adamw_bf16"),
    ("worker.actor.fsdp.enable_cpu_offload", True),
    ("worker.critic.fsdp.enable_cpu_offload", True),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """What lies on the GPU in one part of a step, in bytes by what it is; about."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def find_phases(config: RunConfig, memory: Memory, card: int | None = None, *, on_gpu: bool = True) -> list[Phase]:
    """Return the phases of a step on one GPU.

    Args:
        memory: of the run's states, each on one device.
        on_gpu: not on processors, where there is no CUDA.
        card: bytes of the GPU, of which vLLM takes a share while it samples; None: its cache is not counted.
    """
    actor, rollout, ref = config.worker.actor, config.worker.rollout, config.worker.ref
    host = actor.fsdp.enable_cpu_offload  # the processor keeps weights, gradients and states, and layers visit the GPU
    weights = {"weights": 0 if host else memory.weights}
    states = {"optimizer states": 0 if host else memory.optimizer}
    gradients = {"gradients": 0 if host else memory.gradients}
    visits = ref.fsdp.enable_cpu_offload or ref.offload.offload_params
    reference = {"reference": 0 if ref.fsdp.enable_cpu_offload else memory.reference}
    stays = {} if visits else reference
    leaves = config.shares_devices and actor.offload.offload_params and not config.shares_base(on_gpu=True)
    at_rest = stays | ({} if leaves else weights)
    at_rest |= {} if config.shares_devices and actor.offload.offload_optimizer else states
    sleeps = engine_module(rollout.engine) is not engine_module("embedded")
    engine = {"engine's weights": memory.engine} if config.colocated else {}
    active = engine | _cache(config, memory, card if sleeps else None, sleeps)
    beside = {} if sleeps else engine  # the embedded engine keeps its copy
    busy = {} if actor.offload.offload_optimizer and config.shares_devices else states
    activations = {"activations": _activations(config, "actor")} | _media(config, "actor") | _chunk(config, "actor")
    passing, whole_gradients = _gathers(config)
    forward = _forward(config)
    alone = {"CUDA": CONTEXT} if on_gpu else {}
    base = alone | _critic_at_rest(config, memory)
    return [
        *(Phase(name, alone | at_rest | beside | parts) for name, parts in _critic_phases(config, memory)),
        Phase("sampling", base | at_rest | active),
        Phase("hand-over of weights", base | stays | weights | busy | engine),
        Phase("log-probs", base | stays | weights | busy | beside | reference | forward | passing),
        Phase("gradient", base | stays | weights | busy | beside | gradients | activations | passing | whole_gradients),
        Phase("optimizer step", base | stays | weights | states | beside | gradients),
    ]


def _critic_phases(config: RunConfig, memory: Memory) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield what a critic takes itself while it forecasts, and while it learns; nothing if there is none."""
    critic, states = config.worker.critic, memory.critic
    if states is None:
        return
    host = critic.fsdp.enable_cpu_offload
    weights = {"critic's weights": 0 if host else states.weights}
    optimizer = {"critic's optimizer states": 0 if host else states.optimizer}
    gradients = {"critic's gradients": 0 if host else states.gradients}
    yield "critic's values", weights | ({} if critic.offload.offload_optimizer else optimizer)
    activations = {"critic's activations": _activations(config, "critic")}
    yield (
        "critic's gradient",
        weights | ({} if critic.offload.offload_optimizer else optimizer) | gradients | activations,
    )
    yield "critic's optimizer step", weights | optimizer | gradients


def _critic_at_rest(config: RunConfig, memory: Memory) -> dict[str, int]:
    """What a critic takes while others compute."""
    critic, states = config.worker.critic, memory.critic
    if states is None or critic.fsdp.enable_cpu_offload:
        return {}
    weights = 0 if critic.offload.offload_params else states.weights
    return {"critic at rest": weights + (0 if critic.offload.offload_optimizer else states.optimizer)}


def _cache(config: RunConfig, memory: Memory, card: int | None, sleeps: bool) -> dict[str, int]:
    """What an engine takes for keys and values: vLLM what its share of the card leaves, the embedded one its need."""
    rollout, data = config.worker.rollout, config.data
    if not config.colocated:
        return {}
    if sleeps:
        own = int(rollout.gpu_memory_utilization * card) - memory.engine if card else 0
        return {"engine's cache": max(own, 0)}
    sizes = read_sizes(Path(config.worker.actor.model.model_path or ""))
    sequences = min(max(SEQUENCES, rollout.n), data.rollout_batch_size * rollout.n)
    tokens = sequences * (data.max_prompt_length + data.max_response_length)
    return {"engine's cache": cache_bytes(sizes, tokens, BYTES[rollout.dtype]) if sizes else 0}


def _activations(config: RunConfig, name: Owner) -> int:
    owner: UpdateConfig = getattr(config.worker, name)
    sizes = read_sizes(Path(owner.model.model_path or ""))
    if sizes is None:
        return 0
    most = count_micro_batch_tokens(config, owner.update_size, name)
    tokens = most // config.sequence_ranks(name)
    number, model = min(BYTES[owner.kept_dtype], BYTES[owner.fsdp.mp_param_dtype]), owner.model
    checkpointed, on_host = model.enable_gradient_checkpointing, model.enable_activation_offload
    return activation_bytes(sizes, tokens, number, checkpointed=checkpointed, on_host=on_host)


def _chunk(config: RunConfig, name: Owner) -> dict[str, int]:
    owner: UpdateConfig = getattr(config.worker, name)
    sizes = read_sizes(Path(owner.model.model_path or ""))
    tokens = count_micro_batch_tokens(config, owner.update_size, name)
    return {"log-prob chunk": chunk_bytes(sizes, tokens)} if sizes else {}


def _forward(config: RunConfig) -> dict[str, int]:
    """What one layer makes of a micro-batch without a gradient, and the chunk of its log-probs."""
    actor = config.worker.actor
    sizes = read_sizes(Path(actor.model.model_path or ""))
    if sizes is None:
        return {}
    tokens = count_micro_batch_tokens(config, actor.experience_size) // config.sequence_ranks()
    number = min(BYTES[actor.kept_dtype], BYTES[actor.fsdp.mp_param_dtype])
    layer = tokens * number * sizes.token_of_a_layer
    return {"activations": layer, "log-prob chunk": chunk_bytes(sizes, tokens)}


def _gathers(config: RunConfig) -> tuple[dict[str, int], dict[str, int]]:
    model = config.worker.actor.model
    whole, gradients = gathered_bytes(config, dict(read_shapes(Path(model.model_path or ""))))
    return ({"gathered": whole}, {"gathered gradients": gradients}) if whole else ({}, {})


def _media(config: RunConfig, name: Owner) -> dict[str, int]:
    """What pictures take of a micro-batch with a gradient: what the tower is given, and keeps if it is trained."""
    owner: UpdateConfig = getattr(config.worker, name)
    tower = read_tower(Path(owner.model.model_path or ""))
    if tower is None:
        return {}
    size = owner.update_size
    prompts = -(-size // config.worker.rollout.n) if owner.shares_prompts else size
    patches = prompts * most_patches(config, tower)
    number, model = min(BYTES[owner.kept_dtype], BYTES[owner.fsdp.mp_param_dtype]), owner.model
    checkpointed, on_host = model.enable_gradient_checkpointing, model.enable_activation_offload
    kept = tower_bytes(tower, patches, number, checkpointed=checkpointed, on_host=on_host)
    frozen = model.freeze_vision_tower or model.lora.used
    return {"media": patches * tower.pixels * BYTES["fp32"], "vision activations": 0 if frozen else kept}


def most_patches(config: RunConfig, tower: Tower) -> int:
    """Return the patches of a prompt with as many pictures as it may have, at most: they are part of its tokens."""
    data, pictures = config.data, config.worker.rollout.limit_images or 1
    of_prompt = data.max_prompt_length * tower.merged
    return min(of_prompt, pictures * data.max_pixels // tower.patch**2) if data.max_pixels else of_prompt


def find_remedies(
    config: RunConfig, card: int, *, remedies: Sequence[tuple[str, Any]] = REMEDIES, on_gpu: bool = True
) -> list[str] | None:
    """Return settings with which every phase fits into a GPU of so many bytes, as few as do; [] if all fit as it is.

    None: none of those that r1 knows is enough, or the model is not here to be measured.

    Args:
        remedies: what may be set, the cheapest first.
        on_gpu: the bytes are a GPU's, not those that a process on processors may have.
    """
    peak = partial(find_peak, card=card, on_gpu=on_gpu)
    changed, taken = config, list[tuple[str, Any]]()
    if peak(config) is None:
        return None
    for key, value in (("", None), *remedies):
        if key and _get(changed, key) != value:
            tried = with_value(changed, key, value)
            if (peak(tried) or 0) >= (peak(changed) or 0):
                continue
            changed = tried
            taken.append((key, value))
        if (peak(changed) or 0) <= card:
            return [
                f"{key}={_word(value)}" for key, value in _needed(config, taken, lambda one: (peak(one) or 0) <= card)
            ]
    return None


def _needed(
    config: RunConfig, taken: list[tuple[str, Any]], fits: Callable[[RunConfig], bool]
) -> Iterator[tuple[str, Any]]:
    """Leave out what it would fit without, the dearest first."""
    needed = list(taken)
    for one in reversed(taken):
        without = [other for other in needed if other != one]
        if fits(reduce(lambda changed, setting: with_value(changed, *setting), without, config)):
            needed = without
    yield from needed


def find_peak(config: RunConfig, card: int | None, *, on_gpu: bool = True) -> int | None:
    """Return what the largest phase takes; None if the model is not here to be measured."""
    memory = estimate(config)
    return None if memory is None else max(phase.total for phase in find_phases(config, memory, card, on_gpu=on_gpu))


def _get(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def with_value(section: Any, key: str, value: Any) -> Any:
    """Return a section of the configuration with another value of a dotted key in it, which is not checked."""
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
