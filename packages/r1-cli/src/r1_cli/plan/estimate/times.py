"""The time of each phase on GPUs, from floating-point operations and bytes at assumed efficiencies."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from r1_cli.config import RunConfig
from r1_cli.plan.estimate.cards import Cards
from r1_cli.plan.memory import Memory, compute_bytes
from r1_cli.plan.model_sizes import BYTES, ModelSizes, in_tower
from r1_cli.plan.phases import SEQUENCES, most_patches, teacher_prompt

EXPERT = re.compile(r"\.experts\.")
EMBEDDING = re.compile(r"\.(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
TO_HOST = 25e9  # bytes a second between a GPU and the processor's memory, of 32e9 (PCIe 4) or 64e9 (PCIe 5) at most


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What times depend on besides the configuration."""

    learning: float = 0.4  # share of the GPUs' peak that forward and backward passes reach
    sampling: float = 0.5  # share of the memory's peak that decoding reaches
    prompt_tokens: int | None = None  # of a prompt; None: data.max_prompt_length
    answer_tokens: int | None = None  # of an answer; None: data.max_response_length


@dataclass(frozen=True, slots=True)
class Work:
    """The weights that multiply each token and each patch."""

    of_token: int  # weights that it is multiplied with
    of_patch: int
    trained: float  # share of the weights

    @classmethod
    def of(cls, sizes: ModelSizes, trained: float) -> "Work":
        """Count the weights; of a mixture's experts the selected share."""
        tied = not any(name.startswith("lm_head") for name in sizes.shapes)
        token = patch = 0
        for name, shape in sizes.shapes.items():
            if in_tower(name):
                patch += prod(shape)
            elif sizes.text and EXPERT.search(name):
                token += prod(shape) * sizes.text.chosen // sizes.text.experts
            elif tied or not EMBEDDING.search("." + name):
                token += prod(shape)
        return cls(token, patch, trained)


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    answer: int
    patches: int


def find_times(config: RunConfig, memory: Memory, cards: Cards, assumed: Assumptions) -> dict[str, float]:
    """Return the seconds of each phase of a step; {} if the model's sizes are unknown."""
    sizes = memory.models["actor"]
    text, tower = sizes.text, sizes.tower
    if text is None:
        return {}
    lengths = Lengths(
        assumed.prompt_tokens or config.data.max_prompt_length,
        assumed.answer_tokens or config.data.max_response_length,
        most_patches(config, tower) if tower else 0,
    )
    work = Work.of(sizes, memory.trained / memory.parameters)
    attention = 2 * text.layers * text.hidden * (lengths.prompt + lengths.answer)  # of a token's, going forward
    speed = cards.flops * assumed.learning * cards.nodes * cards.of_node
    forward = _forward_operations(config, work, lengths, attention)
    longer = teacher_prompt(config, tower) - config.data.max_prompt_length
    teachers = replace(lengths, prompt=max(lengths.prompt + longer, 1))
    reading = _forward_operations(config, work, teachers, attention) if longer else forward
    passes = dict(_learning(config, memory, work, forward / speed, reading / speed))
    if not config.samples:
        return passes | {"optimizer step": _optimizer(config, memory, cards)}
    served = config.worker.rollout.servers.used
    sampling = {} if served else {"sampling": _sampling(config, memory, work, lengths, cards, assumed)}
    return (
        sampling
        | {"weight sync and offloading": _moving(config, memory, cards)}
        | passes
        | {"optimizer step": _optimizer(config, memory, cards)}
    )


def _forward_operations(config: RunConfig, work: Work, lengths: Lengths, attention: int) -> float:
    prompts, n = config.data.rollout_batch_size, config.worker.rollout.n
    copies = 1 if config.worker.actor.shares_prompts else n
    tokens = prompts * (copies * lengths.prompt + n * lengths.answer)
    return float(tokens * (2 * work.of_token + attention) + 2 * prompts * copies * lengths.patches * work.of_patch)


def _learning(
    config: RunConfig, memory: Memory, work: Work, forward: float, reading: float
) -> Iterator[tuple[str, float]]:
    actor = config.worker.actor
    if config.worker.actor.loss_type not in ("nll", "dft"):  # whose pass with a gradient gives them
        yield "log-probs", forward
    if not config.algorithm.disable_kl:
        yield "reference's log-probs", forward
    if config.worker.teacher.is_policy:
        yield "teacher's log-probs", reading
    elif memory.teacher:
        weights = memory.teacher * config.shard_ranks / compute_bytes(actor)
        yield "teacher's log-probs", reading * weights / memory.parameters

    def gradient(model_trained: float, checkpointed: bool) -> float:
        return forward * (2 + model_trained + checkpointed)

    yield "gradient", actor.ppo_epochs * gradient(work.trained, actor.model.enable_gradient_checkpointing)
    if config.has_critic:
        critic = config.worker.critic
        yield "critic's values", forward
        yield "critic's gradient", critic.ppo_epochs * gradient(1, critic.model.enable_gradient_checkpointing)


def _sampling(
    config: RunConfig,
    memory: Memory,
    work: Work,
    lengths: Lengths,
    cards: Cards,
    assumed: Assumptions,
) -> float:
    rollout, size = config.worker.rollout, config.worker.rollout.engine_size
    apart = rollout.engines.nnodes * rollout.engines.n_gpus_per_node
    engines = max((apart or cards.nodes * cards.of_node) // size, 1)
    prompts = -(-config.data.rollout_batch_size // engines)
    sequences = prompts * rollout.n
    at_once = min(max(SEQUENCES, rollout.n), sequences)
    text, number = memory.models["actor"].text, BYTES[rollout.dtype]
    cached = at_once * text.cache_bytes(lengths.prompt + lengths.answer // 2, number) if text else 0
    weights = memory.parameters * number
    flops = size * cards.flops * assumed.learning
    token = max((weights + cached) / (size * cards.bandwidth * assumed.sampling), 2 * work.of_token * at_once / flops)
    prefill = prompts * 2 * (lengths.prompt * work.of_token + lengths.patches * work.of_patch) / flops
    return prefill + -(-sequences // at_once) * lengths.answer * token


def _moving(config: RunConfig, memory: Memory, cards: Cards) -> float:
    offload = config.worker.actor.offload
    waits = (memory.weights if offload.offload_params else 0) + (memory.optimizer if offload.offload_optimizer else 0)
    moved = 2 * waits / TO_HOST if config.shares_devices else 0.0
    return moved + 2 * memory.parameters * BYTES[config.worker.rollout.dtype] / cards.bandwidth


def _optimizer(config: RunConfig, memory: Memory, cards: Cards) -> float:
    actor = config.worker.actor
    steps = config.data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs
    trained = memory.trained / memory.parameters
    read = 2 * (memory.weights * trained + memory.optimizer) + memory.gradients
    return steps * read / (TO_HOST if actor.fsdp.enable_cpu_offload else cards.bandwidth)
