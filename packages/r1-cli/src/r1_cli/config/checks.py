"""What the types cannot say: values that do not fit one another, and things that are missing."""

from collections.abc import Iterator
from typing import Literal

from r1_cli.config.errors import Problem
from r1_cli.config.files import file_problems
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig, lookup

Command = Literal["train", "eval"]
Finding = tuple[str, str]  # a key and what is wrong with its value

GROUPED = ("grpo", "dr_grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "maxrl")


def find_problems(config: RunConfig, provenance: Provenance, command: Command) -> list[Problem]:
    """Return everything that would stop the run later, found without loading anything.

    Batch rules are those of EasyR1: `rollout_batch_size` prompts are sampled a step, cut into optimizer steps of
    `global_batch_size` prompts, spread over the devices and cut again into micro-batches.
    """
    findings = [*_required(config, command), *_sampling(config), *_pixels(config), *file_problems(config, command)]
    if command == "train":
        findings += [
            *_batches(config),
            *_micro_batches(config),
            *_parallel(config, provenance),
            *_algorithm(config),
            *_optimizer(config),
            *_trainer(config),
        ]
    return [_problem(config, provenance, key, message) for key, message in findings]


def _problem(config: RunConfig, provenance: Provenance, key: str, message: str) -> Problem:
    value = lookup(config, key)
    if value is None:
        return Problem(key, message)
    return Problem(key, message, str(value), provenance.origins.get(key, "default"))


def _required(config: RunConfig, command: Command) -> Iterator[Finding]:
    rows = "data.train_files" if command == "train" else "data.val_files"
    if not lookup(config, rows):
        yield rows, "is missing: name a hub dataset (name@split), a folder or a .json, .jsonl, .parquet or .csv file"
    if not config.worker.actor.model.model_path:
        yield "worker.actor.model.model_path", "is missing: name a Hugging Face folder or hub model"
    if not config.worker.reward.reward_function:
        yield "worker.reward.reward_function", "is missing: name math, r1v, gsm8k or ./file.py:function"


def _batches(config: RunConfig) -> Iterator[Finding]:
    data, actor, n = config.data, config.worker.actor, config.worker.rollout.n
    if data.rollout_batch_size % actor.global_batch_size:
        yield (
            "worker.actor.global_batch_size",
            f"must divide data.rollout_batch_size ({data.rollout_batch_size}); "
            f"{_nearest_divisors(data.rollout_batch_size, actor.global_batch_size)} would do",
        )
    mini = data.mini_rollout_batch_size
    if mini is not None and data.rollout_batch_size % mini:
        yield (
            "data.mini_rollout_batch_size",
            f"must divide data.rollout_batch_size ({data.rollout_batch_size}); "
            f"{_nearest_divisors(data.rollout_batch_size, mini)} would do",
        )
    critic = config.worker.critic
    if config.algorithm.adv_estimator == "gae" and data.rollout_batch_size % critic.global_batch_size:
        yield "worker.critic.global_batch_size", f"must divide data.rollout_batch_size ({data.rollout_batch_size})"
    if config.algorithm.adv_estimator in GROUPED and n < 2:
        yield (
            "worker.rollout.n",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares the answers to one prompt: at least 2",
        )
    if data.val_batch_size == 0 or data.val_batch_size < -1:
        yield "data.val_batch_size", "must be at least 1, or -1 for all at once"


def _micro_batches(config: RunConfig) -> Iterator[Finding]:
    actor, n = config.worker.actor, config.worker.rollout.n
    replicas = max(1, config.trainer.devices // actor.ulysses_size)
    update, step = actor.global_batch_size * n, config.data.rollout_batch_size * n
    if update % replicas:
        yield (
            "worker.actor.global_batch_size",
            f"× worker.rollout.n ({n}) = {update} sequences must be a multiple of the {replicas} data-parallel devices",
        )
    elif not actor.dynamic_batching:
        micro = actor.micro_batch_size_per_device_for_update
        if update // replicas % micro:
            yield (
                "worker.actor.micro_batch_size_per_device_for_update",
                f"must divide the {update // replicas} sequences per device and optimizer step "
                f"(global_batch_size × n ÷ devices); {_nearest_divisors(update // replicas, micro)} would do, "
                "or set worker.actor.dynamic_batching=true",
            )
        micro = actor.micro_batch_size_per_device_for_experience
        if step // replicas % micro:
            yield (
                "worker.actor.micro_batch_size_per_device_for_experience",
                f"must divide the {step // replicas} sequences per device and step (rollout_batch_size × n ÷ devices); "
                f"{_nearest_divisors(step // replicas, micro)} would do, or set worker.actor.dynamic_batching=true",
            )


def _parallel(config: RunConfig, provenance: Provenance) -> Iterator[Finding]:
    devices, rollout, actor = config.trainer.devices, config.worker.rollout, config.worker.actor
    shown = f"(trainer.nnodes × trainer.n_gpus_per_node = {devices})"
    if devices % actor.ulysses_size:
        yield "worker.actor.ulysses_size", f"must divide the number of devices {shown}"
    # EasyR1's default of 2 is not held against a run on one device.
    if provenance.is_set("worker.rollout.tensor_parallel_size") and devices % rollout.tensor_parallel_size:
        yield "worker.rollout.tensor_parallel_size", f"must divide the number of devices {shown}"
    longest = config.data.max_prompt_length + config.data.max_response_length
    lengths = f"data.max_prompt_length + data.max_response_length ({longest})"
    if rollout.name == "vllm" and not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        yield "worker.rollout.max_num_batched_tokens", f"must be at least {lengths}"
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield "worker.rollout.max_model_len", f"must be at least {lengths}, or null"


def _sampling(config: RunConfig) -> Iterator[Finding]:
    rollout = config.worker.rollout
    for key, top_k in (
        ("worker.rollout.top_k", rollout.top_k),
        ("worker.rollout.val_override_config.top_k", rollout.val_override_config.top_k),
    ):
        if top_k is not None and top_k < 1 and top_k != -1:
            yield key, "must be at least 1, or -1 for no limit"
    limit = rollout.val_override_config.max_tokens
    if limit is not None and limit > config.data.max_response_length:
        yield (
            "worker.rollout.val_override_config.max_tokens",
            f"must be at most data.max_response_length ({config.data.max_response_length})",
        )


def _pixels(config: RunConfig) -> Iterator[Finding]:
    least, most = config.data.min_pixels, config.data.max_pixels
    if least is not None and most is not None and least > most:
        yield "data.min_pixels", f"must be at most data.max_pixels ({most})"


def _algorithm(config: RunConfig) -> Iterator[Finding]:
    algorithm, actor = config.algorithm, config.worker.actor
    if algorithm.online_filtering and algorithm.filter_low >= algorithm.filter_high:
        yield "algorithm.filter_low", f"must be less than algorithm.filter_high ({algorithm.filter_high})"
    if config.worker.rollout.temperature == 0:
        yield "worker.rollout.temperature", "must be above 0 in training: greedy answers to one prompt are all the same"
    if actor.loss_type == "default" and actor.clip_ratio_low > 1:
        yield "worker.actor.clip_ratio_low", "must be at most 1: the ratio is clipped to [1 - low, 1 + high]"


def _optimizer(config: RunConfig) -> Iterator[Finding]:
    for owner in ("actor", "critic"):
        if any(beta >= 1 for beta in lookup(config, f"worker.{owner}.optim.betas")):
            yield f"worker.{owner}.optim.betas", "must be below 1"
        bf16 = lookup(config, f"worker.{owner}.optim.strategy") == "adamw_bf16"
        if bf16 and lookup(config, f"worker.{owner}.kept_dtype") != "bf16":
            yield (
                f"worker.{owner}.fsdp.torch_dtype",
                f"must be bf16 or null: worker.{owner}.optim.strategy=adamw_bf16 trains bf16 weights",
            )


def _trainer(config: RunConfig) -> Iterator[Finding]:
    trainer = config.trainer
    if trainer.val_only and not config.data.val_files:
        yield "trainer.val_only", "needs data.val_files"
    if trainer.max_try_make_batch == 0 or trainer.max_try_make_batch < -1:
        yield "trainer.max_try_make_batch", "must be at least 1, or -1 for no limit"


def _nearest_divisors(total: int, wanted: int) -> str:
    """Return the divisors of `total` next to `wanted`, as text."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))
