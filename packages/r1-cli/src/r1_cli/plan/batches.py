"""The arithmetic of steps, optimizer steps and micro-batches, without loading anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.root import Owner
from r1_cli.config.section import SizeOrAuto
from r1_cli.config.sources import Source, count_rows, training_sources, validation_sources
from r1_cli.plan.memory import Memory, estimate
from r1_data.curriculum import Band, read_pass_rates
from r1_data.sources import read_rows
from r1_data.stream import WeightedStream
from r1_data.types import DataError

LOOKED_AT = 1000  # rows of a source too small for a batch, in which broken ones are looked for


@dataclass(frozen=True, slots=True)
class Plan:
    """The arithmetic of a run. A sequence is a prompt with one answer; None: unknown.

    Example (2100 rows, rollout_batch_size 256, n 6, global_batch_size 64, micro batches 2 and 8, 8 devices): 8 steps an
    epoch, 1536 sequences a step; per device 192 sequences, 4 optimizer steps of 48 sequences in 24 micro-batches, and
    24 forward passes for log-probs.
    """

    rows: int | None  # of training, before any filter; with a curriculum, those in its band
    val_rows: int | None
    has_validation: bool
    devices: int
    devices_per_sequence: int
    prompts_per_step: int
    steps_per_epoch: int | None  # the last, partial batch is dropped
    total_steps: int | None
    sequences_per_step: int
    sequences_per_device: int  # or, as all that is counted by device, by those that share sequences
    optimizer_steps_per_step: int
    sequences_per_optimizer_step: int
    sequences_per_optimizer_step_and_device: int
    accumulations: int | None  # micro-batches of an optimizer step on one device; None: they choose themselves
    experience_forwards: int | None  # of a step on one device when log-probs are recomputed; None: likewise
    is_upper_bound: bool  # with a token budget, short answers need fewer micro-batches than counted here
    shares_prompts: bool  # tokens and micro-batches are counted with each prompt once for its answers
    tokens_per_micro_batch: int | None  # None: likewise
    tokens_per_step: int
    checkpoint_folder: Path
    memory: Memory | None  # per device; None if the model is not a local folder
    critic_steps_per_step: int = 0  # optimizer steps of the critic; 0: there is none
    critic_devices_per_sequence: int = 1
    outside: int = 0  # rows that the curriculum leaves out


def make_plan(
    config: RunConfig, rows: int | Sequence[int] | None, val_rows: int | None = None, outside: int = 0
) -> Plan:
    """Return the plan of a run on `rows` training rows (None: unknown). Raises ConfigError if they fill no batch."""
    data, actor, n = config.data, config.worker.actor, config.worker.rollout.n
    sizes = [rows] if isinstance(rows, int) else rows
    steps_per_epoch = None if sizes is None else count_steps(config, sizes)
    replicas = config.data_ranks()
    step = data.rollout_batch_size * n
    update = actor.global_batch_size * n
    micro, experience = actor.micro_batch_size_per_device_for_update, actor.micro_batch_size_per_device_for_experience
    return Plan(
        rows=None if sizes is None else sum(sizes),
        val_rows=val_rows,
        has_validation=bool(validation_sources(data)),
        devices=config.trainer.devices,
        devices_per_sequence=config.sequence_ranks(),
        prompts_per_step=data.rollout_batch_size,
        steps_per_epoch=steps_per_epoch,
        total_steps=_total_steps(config, steps_per_epoch),
        sequences_per_step=step,
        sequences_per_device=step // replicas,
        optimizer_steps_per_step=data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs,
        sequences_per_optimizer_step=update,
        sequences_per_optimizer_step_and_device=update // replicas,
        accumulations=_passes(config, actor.global_batch_size, micro),
        experience_forwards=_passes(config, data.rollout_batch_size, experience),
        is_upper_bound=actor.dynamic_batching,
        shares_prompts=actor.shares_prompts,
        tokens_per_micro_batch=count_micro_batch_tokens(config, micro) if isinstance(micro, int) else None,
        tokens_per_step=count_tokens(config, data.rollout_batch_size),
        checkpoint_folder=config.trainer.checkpoint_folder,
        memory=estimate(config),
        critic_steps_per_step=_critic_steps(config),
        critic_devices_per_sequence=config.sequence_ranks("critic") if config.has_critic else 1,
        outside=outside,
    )


def _critic_steps(config: RunConfig) -> int:
    critic = config.worker.critic
    return config.data.rollout_batch_size // critic.global_batch_size * critic.ppo_epochs if config.has_critic else 0


def count(config: RunConfig) -> tuple[list[int] | None, int | None, int]:
    """Return the rows of each training source and of validation, None if not local, and those outside the curriculum.

    Raises ConfigError if rows lack the curriculum's pass rate.
    """
    train, val = training_sources(config.data), validation_sources(config.data)
    val_rows = count_rows(val) if val else None
    rows, band, outside = count_rows(train) if train else None, config.data.curriculum.read, 0
    if rows is not None and band is not None:
        inside = [count_in_band(source, band) for source in train]
        rows, outside = inside, sum(rows) - sum(inside)
    return rows, None if val_rows is None else sum(val_rows), outside


def count_in_band(source: Source, band: Band) -> int:
    """Return the rows of a source in the band. Raises ConfigError if a row has no pass rate, or none is in it."""
    try:
        return len(band.levels(read_pass_rates(read_rows(list(source.files)), band)))
    except DataError as error:
        raise ConfigError([Problem("data.curriculum.by", f"{source.label}: {error}", "pass_rate")]) from error


def count_steps(config: RunConfig, sizes: Sequence[int]) -> int:
    """Return the steps of an epoch on sources of these sizes. Raises ConfigError if they fill no batch."""
    data, sources = config.data, training_sources(config.data)
    weights = [source.weight for source in sources if source.weight]
    if weights:
        until = data.stopping_strategy
        stream = WeightedStream(sizes, weights, data.rollout_batch_size, seed=data.seed, shuffle=False, until=until)
        return stream.batches_per_epoch
    if sum(sizes) < data.rollout_batch_size:
        named = ", ".join(source.label for source in sources)
        message = f"is more than the {sum(sizes)} rows of {named}, so no batch is ever full"
        broken = [Problem(source.key, str(error)) for source in sources for error in _unreadable(source)]
        raise ConfigError([*broken[:3], Problem("data.rollout_batch_size", message, str(data.rollout_batch_size))])
    return sum(sizes) // data.rollout_batch_size


def _unreadable(source: Source) -> Iterator[DataError]:
    if count_rows([source]) is None:
        return
    rows = read_rows(list(source.files))
    for index in range(min(len(rows), LOOKED_AT)):
        try:
            rows[index]
        except DataError as error:
            yield error


def _total_steps(config: RunConfig, steps_per_epoch: int | None) -> int | None:
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    return None if steps_per_epoch is None else steps_per_epoch * config.trainer.total_epochs


def _passes(config: RunConfig, prompts: int, size: SizeOrAuto) -> int | None:
    return count_micro_batches(config, prompts, size) if isinstance(size, int) else None


def count_tokens(config: RunConfig, prompts: int, owner: Owner = "actor") -> int:
    data, n = config.data, config.worker.rollout.n
    times = 1 if config.trained(owner).shares_prompts else n
    return prompts * (times * data.max_prompt_length + n * data.max_response_length)


def count_micro_batches(config: RunConfig, prompts: int, size: int, owner: Owner = "actor") -> int:
    """Return the most micro-batches of `size` sequences that a device computes of `prompts` prompts.

    This is the bound of `r1_core.learner.batching.split_groups`, which needs torch, for full sequences.
    """
    n, replicas = config.worker.rollout.n, config.data_ranks(owner)
    if not config.trained(owner).shares_prompts:
        return _ceil(prompts * n // replicas, size)
    most = _most_answers(config, size, owner)
    whole, rest = divmod(n, most)
    if rest == 0:
        return _ceil(prompts * whole, replicas)
    if config.trained(owner).dynamic_batching and whole:
        return _ceil(prompts * (whole + 1), replicas)
    return _ceil(prompts * whole + _ceil(prompts, _groups(config, size, rest, owner)), replicas)


def count_micro_batch_tokens(config: RunConfig, size: int, owner: Owner = "actor") -> int:
    data, n, trained = config.data, config.worker.rollout.n, config.trained(owner)
    if trained.dynamic_batching or not trained.shares_prompts:
        return size * (data.max_prompt_length + data.max_response_length)
    rest = n % size
    prompts = _groups(config, size, rest, owner) if rest else 1
    return prompts * data.max_prompt_length + size * data.max_response_length


def _most_answers(config: RunConfig, size: int, owner: Owner) -> int:
    data = config.data
    if not config.trained(owner).dynamic_batching:
        return size
    budget = size * (data.max_prompt_length + data.max_response_length)
    return max((budget - data.max_prompt_length) // data.max_response_length, 1)


def _groups(config: RunConfig, size: int, answers: int, owner: Owner) -> int:
    data = config.data
    if not config.trained(owner).dynamic_batching:
        return size // answers
    budget = size * (data.max_prompt_length + data.max_response_length)
    return max(budget // (data.max_prompt_length + answers * data.max_response_length), 1)


def _ceil(total: int, size: int) -> int:
    return -(-total // size)
