"""GPU memory of each phase of a step, and the settings that make a step fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from r1_cli.config import RunConfig
from r1_cli.config.model import ModelConfig
from r1_cli.config.rollout import engine_module
from r1_cli.config.root import Owner
from r1_cli.config.section import lookup, with_value
from r1_cli.plan.batches import count_micro_batch_tokens
from r1_cli.plan.memory import Memory, compute_bytes, estimate
from r1_cli.plan.model_sizes import BYTES, Models, ModelSizes, TowerSizes, read_models

CONTEXT = 1 << 30  # bytes of a GPU for CUDA, its libraries and fragmentation, about
ASLEEP = 2 << 30  # bytes that a sleeping vLLM keeps for its process, its graphs and workspaces, about: from its sources
SEQUENCES = 256  # that decode at the same time in an engine (`build.engines.max_sequences`)
# What can be set so that less is on the GPU at once, the cheapest first.
Remedy = tuple[str, Any]  # a key, and the value that saves memory
REMEDIES: tuple[Remedy, ...] = (
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
    ("worker.rollout.multi_turn.prefix_cache_gb", 0),
    ("worker.rollout.gpu_memory_utilization", 0.5),
    ("worker.actor.optim.strategy", "adamw_bf16"),
    ("worker.actor.fsdp.enable_cpu_offload", True),
    ("worker.critic.fsdp.enable_cpu_offload", True),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Approximate bytes on a GPU in one part of a step."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def find_phases(config: RunConfig, memory: Memory, card: int | None = None, *, on_gpu: bool = True) -> list[Phase]:
    """Return the phases of a step on one GPU.

    Args:
        card: bytes of the GPU; None: vLLM's cache, a share of them, is not counted.
        on_gpu: False without GPUs: CUDA takes nothing.
    """
    actor, rollout, ref = config.worker.actor, config.worker.rollout, config.worker.ref
    on_host = actor.fsdp.enable_cpu_offload  # layers are copied to the GPU one by one
    weights = {"weights": 0 if on_host else memory.weights}
    states = {"optimizer states": 0 if on_host else memory.optimizer}
    gradients = {"gradients": 0 if on_host else memory.gradients}
    ref_offloaded = ref.fsdp.enable_cpu_offload or ref.offload.offload_params
    reference = {"reference": 0 if ref.fsdp.enable_cpu_offload else memory.reference}
    resident_ref = {} if ref_offloaded else reference
    if memory.teacher and not (config.worker.teacher.offload and config.worker.teacher.in_learner):
        resident_ref = resident_ref | {"teacher": memory.teacher}
    if memory.other_teachers:
        resident_ref = resident_ref | {"other teachers": memory.other_teachers}
    weights_offloaded = config.shares_devices and actor.offload.offload_params and not config.shares_base(on_gpu=True)
    learner_idle = resident_ref | ({} if weights_offloaded else weights)
    learner_idle |= {} if config.shares_devices and actor.offload.offload_optimizer else states
    engine_offloads = engine_module(rollout.engine) is not engine_module("embedded")
    engine = {"engine's weights": memory.engine} if config.colocated else {}
    engine_active = engine | _cache(config, memory, card if engine_offloads else None, engine_offloads)
    asleep = {"engine asleep": ASLEEP} if on_gpu and config.colocated else {}
    engine_idle = asleep if engine_offloads else engine  # the embedded engine keeps its copy
    idle_states = {} if actor.offload.offload_optimizer and config.shares_devices else states
    sizes = memory.models["actor"]
    activations = {"activations": _activations(config, sizes, "actor")} | _media(config, sizes) | _chunk(config, sizes)
    gathered, gathered_gradients = _gathered(config, sizes, on_gpu)
    forward = _forward(config, sizes)
    cuda = {"CUDA": CONTEXT} if on_gpu else {}
    always = cuda | _idle_critic(config, memory)
    common = always | resident_ref | weights
    learning = common | idle_states | engine_idle
    sampling = [
        Phase("sampling", always | learner_idle | engine_active),
        Phase("weight sync", common | idle_states | engine),
    ]
    return [
        *(Phase(name, cuda | learner_idle | engine_idle | parts) for name, parts in _critic_phases(config, memory)),
        *(sampling if config.samples else []),
        Phase("log-probs", learning | reference | forward | gathered),
        *_teacher_phase(config, sizes, learning | gathered),
        Phase("gradient", learning | gradients | activations | gathered | gathered_gradients),
        Phase("optimizer step", common | states | engine_idle | gradients),
    ]


def _critic_phases(config: RunConfig, memory: Memory) -> Iterator[tuple[str, dict[str, int]]]:
    critic, states = config.worker.critic, memory.critic
    if states is None:
        return
    host = critic.fsdp.enable_cpu_offload
    weights = {"critic's weights": 0 if host else states.weights}
    optimizer = {"critic's optimizer states": 0 if host else states.optimizer}
    gradients = {"critic's gradients": 0 if host else states.gradients}
    yield "critic's values", weights | ({} if critic.offload.offload_optimizer else optimizer)
    activations = {"critic's activations": _activations(config, memory.models["critic"], "critic")}
    yield (
        "critic's gradient",
        weights | ({} if critic.offload.offload_optimizer else optimizer) | gradients | activations,
    )
    yield "critic's optimizer step", weights | optimizer | gradients


def _idle_critic(config: RunConfig, memory: Memory) -> dict[str, int]:
    critic, states = config.worker.critic, memory.critic
    if states is None or critic.fsdp.enable_cpu_offload:
        return {}
    weights = 0 if critic.offload.offload_params else states.weights
    return {"critic at rest": weights + (0 if critic.offload.offload_optimizer else states.optimizer)}


def _cache(config: RunConfig, memory: Memory, card: int | None, offloads: bool) -> dict[str, int]:
    rollout, data = config.worker.rollout, config.data
    if not config.colocated:
        return {}
    if offloads:
        own = int(rollout.gpu_memory_utilization * card) - memory.engine if card else 0
        return {"engine's cache": max(own, 0)}
    text, samples = memory.models["actor"].text, data.rollout_batch_size * rollout.n
    of_sample = data.max_prompt_length + data.max_response_length
    each = text.cache_bytes(of_sample, BYTES[rollout.dtype]) if text else 0
    cache = {"engine's cache": min(max(SEQUENCES, rollout.n), samples) * each}
    if not rollout.multi_turn.enable:
        return cache
    most = int(rollout.multi_turn.prefix_cache_gb * (1 << 30))
    return cache | {"kept turns": min(most, samples * each) if text else most}


def _activations(config: RunConfig, sizes: ModelSizes, owner: Owner) -> int:
    if sizes.text is None:
        return 0
    section = config.trained(owner)
    tokens = count_micro_batch_tokens(config, section.update_size, owner) // config.sequence_ranks(owner)
    return sizes.text.activation_bytes(tokens, compute_bytes(section), **_checkpointing(section.model))


def _checkpointing(model: ModelConfig) -> dict[str, bool]:
    return {"checkpointed": model.enable_gradient_checkpointing, "on_host": model.enable_activation_offload}


def _chunk(config: RunConfig, sizes: ModelSizes) -> dict[str, int]:
    tokens = count_micro_batch_tokens(config, config.worker.actor.update_size)
    return {"log-prob chunk": sizes.text.chunk_bytes(tokens)} if sizes.text else {}


def _forward(config: RunConfig, sizes: ModelSizes) -> dict[str, int]:
    if sizes.text is None:
        return {}
    actor = config.worker.actor
    return _forward_of(config, sizes, count_micro_batch_tokens(config, actor.experience_size))


def _forward_of(config: RunConfig, sizes: ModelSizes, tokens: int) -> dict[str, int]:
    if sizes.text is None:
        return {}
    tokens //= config.sequence_ranks()
    layer = tokens * compute_bytes(config.worker.actor) * sizes.text.token_of_a_layer
    return {"activations": layer, "log-prob chunk": sizes.text.chunk_bytes(tokens)}


def _teacher_phase(config: RunConfig, sizes: ModelSizes, parts: dict[str, int]) -> Iterator[Phase]:
    """Yield the phase in which the learner reads teachers' prompts, if they are longer than the policy's.

    A micro-batch has as many samples; with dynamic batching as many tokens, or one sample that has more.
    """
    data, actor, prompt = config.data, config.worker.actor, teacher_prompt(config, sizes.tower)
    if sizes.text is None or prompt <= data.max_prompt_length:
        return
    tokens = count_micro_batch_tokens(with_value(config, "data.max_prompt_length", prompt), actor.experience_size)
    if actor.dynamic_batching:
        own = count_micro_batch_tokens(config, actor.experience_size)
        tokens = max(own, prompt + data.max_response_length)
    yield Phase("teacher's log-probs", parts | _forward_of(config, sizes, tokens))


def teacher_prompt(config: RunConfig, tower: TowerSizes | None) -> int:
    """Return the most tokens of a prompt that the learner reads as a teacher.

    Without `worker.teacher.max_prompt_length` that is the policy's with sharper pictures; a context's text is unknown.
    """
    data, teacher = config.data, config.worker.teacher
    more = [one for one in teacher.read_by_learner if one.privileged]
    if not more or teacher.max_prompt_length:
        return (teacher.max_prompt_length or 0) if more else data.max_prompt_length
    if tower is None or data.max_pixels is None:
        return data.max_prompt_length
    of_token, pictures = tower.patch**2 * tower.merged, config.worker.rollout.limit_images or 1
    sharper = max((one.max_pixels or data.max_pixels) // of_token - data.max_pixels // of_token for one in more)
    return data.max_prompt_length + pictures * max(sharper, 0)


def _gathered(config: RunConfig, sizes: ModelSizes, on_gpu: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return what FSDP gathers: weights in the forward pass, gradients in the backward pass; {} on one CPU.

    Forward: the weights outside of all blocks, a block and the prefetched next one; with enable_full_shard=false all.
    One GPU gathers, too: copies in the precision that it computes with.
    Backward: the largest part's whole gradients, in the reduction's precision.
    """
    fsdp, number = config.worker.actor.fsdp, compute_bytes(config.worker.actor)
    if config.shard_ranks == 1 and not on_gpu:
        return {}, {}
    block, rest = sizes.block_sizes
    whole = rest + 2 * block if fsdp.enable_full_shard else sizes.parameters
    trained = sizes.count_trained(config.worker.actor.model)  # few under an adapter
    gradients = min(max(block, rest), trained) * (number + BYTES[fsdp.mp_reduce_dtype])
    return {"gathered": whole * number}, {"gathered gradients": gradients}


def _media(config: RunConfig, sizes: ModelSizes) -> dict[str, int]:
    tower, actor = sizes.tower, config.worker.actor
    if tower is None:
        return {}
    size = actor.update_size
    prompts = -(-size // config.worker.rollout.n) if actor.shares_prompts else size
    patches = prompts * most_patches(config, tower)
    frozen = actor.model.freeze_vision_tower or actor.model.lora.used
    saved = 0 if frozen else tower.activation_bytes(patches, compute_bytes(actor), **_checkpointing(actor.model))
    return {"media": patches * tower.pixels * BYTES["fp32"], "vision activations": saved}


def most_patches(config: RunConfig, tower: TowerSizes) -> int:
    """Return the most patches of a prompt; they are part of its tokens."""
    data, pictures = config.data, config.worker.rollout.limit_images or 1
    of_prompt = data.max_prompt_length * tower.merged
    return min(of_prompt, pictures * data.max_pixels // tower.patch**2) if data.max_pixels else of_prompt


def find_remedies(
    config: RunConfig,
    card: int,
    *,
    models: Models | None = None,
    remedies: Sequence[Remedy] = REMEDIES,
    on_gpu: bool = True,
) -> list[str] | None:
    """Return the fewest settings that make every phase fit in `card` bytes; None if none do, or without sizes.

    Args:
        models: None: read from the models' folders.
        remedies: settings to try, the cheapest first.
        on_gpu: False: `card` is the memory of a process without GPUs.
    """
    models = read_models(config) if models is None else models
    peak = partial(find_peak, card=card, models=models, on_gpu=on_gpu)
    changed, taken = config, list[Remedy]()
    if peak(config) is None:
        return None
    for key, value in (("", None), *remedies):
        if key and lookup(changed, key) != value:
            tried = with_value(changed, key, value)
            if (peak(tried) or 0) >= (peak(changed) or 0):
                continue
            changed = tried
            taken.append((key, value))
        if (peak(changed) or 0) <= card:
            return [
                f"{key}={write_word(value)}"
                for key, value in _needed(config, taken, lambda one: (peak(one) or 0) <= card)
            ]
    return None


def _needed(config: RunConfig, taken: list[Remedy], fits: Callable[[RunConfig], bool]) -> Iterator[Remedy]:
    needed = list(taken)
    for one in reversed(taken):
        without = [other for other in needed if other != one]
        if fits(reduce(lambda changed, setting: with_value(changed, *setting), without, config)):
            needed = without
    yield from needed


def find_peak(config: RunConfig, card: int | None, *, models: Models | None = None, on_gpu: bool = True) -> int | None:
    """Return the bytes of the largest phase; None if the model's sizes are unknown."""
    memory = estimate(config, models)
    return None if memory is None else max(phase.total for phase in find_phases(config, memory, card, on_gpu=on_gpu))


def write_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
