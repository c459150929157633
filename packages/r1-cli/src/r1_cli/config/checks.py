"""What the types cannot say: values that do not fit one another, and things that are missing."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from r1_cli.config.algorithm import bounds
from r1_cli.config.errors import Problem
from r1_cli.config.files import file_problems
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, needs_of
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig, lookup, masked, masked_keys
from r1_cli.config.sampling import engine_problems, sampling_problems, server_problems
from r1_cli.config.sequences import sequence_problems
from r1_cli.config.sources import Source, training_sources, validation_sources
from r1_cli.config.staleness import staleness_problems
from r1_cli.config.worker import UpdateConfig
from r1_core import catalogue
from r1_core.kl_control import MAX_ERROR
from r1_core.settings import fault

Command = Literal["train", "eval", "data"]
Finding = tuple[str, str]  # a key and what is wrong with its value


def find_problems(config: RunConfig, provenance: Provenance, command: Command) -> list[Problem]:
    """Return everything that would stop the run later, found without loading anything.

    Batch rules are those of EasyR1: `rollout_batch_size` prompts are sampled a step, cut into optimizer steps of
    `global_batch_size` prompts, spread over the devices and cut again into micro-batches.
    """
    findings = [
        *_required(config, command),
        *_sources(config),
        *sampling_problems(config),
        *server_problems(config, command),
        *_pixels(config),
        *file_problems(config, command),
    ]
    if command == "train":
        findings += [
            *_batches(config),
            *_optimizer_batches(config, "actor"),
            *_critic(config, provenance),
            *_parallel(config, provenance),
            *_algorithm(config),
            *_needs(config),
            *_ranges(config),
            *_filter(config),
            *_rejections(config),
            *_overlong_buffer(config),
            *_optimizer(config),
            *_adapter(config),
            *_trainer(config),
            *staleness_problems(config, provenance),
        ]
    secrets = _secrets(config) if command != "data" else []
    return [_problem(config, provenance, key, message) for key, message in findings] + [*secrets]


def _problem(config: RunConfig, provenance: Provenance, key: str, message: str) -> Problem:
    value = masked(lookup(config, key))
    if value is None or key.endswith("sources"):  # sections, whose message names the entry
        return Problem(key, message)
    return Problem(key, message, str(value), provenance.origins.get(key, "default"))


def _required(config: RunConfig, command: Command) -> Iterator[Finding]:
    train, validation = training_sources(config.data), validation_sources(config.data)
    if not (validation if command == "eval" else train if command == "train" else train + validation):
        rows = "data.val_files" if command == "eval" else "data.train_files"
        yield rows, "is missing: name a hub dataset (name@split), a folder or a .json, .jsonl, .parquet or .csv file"
    if not config.worker.actor.model.model_path:
        yield "worker.actor.model.model_path", "is missing: name a Hugging Face folder or hub model"
    judged = validation if command == "eval" else train + validation
    if command != "data" and not (config.worker.reward.reward_function or _all_name_a_reward(judged)):
        yield "worker.reward.reward_function", "is missing: name math, r1v, gsm8k or ./file.py:function"


def _all_name_a_reward(sources: list[Source]) -> bool:
    judged = {source.name for source in sources if source.reward_function}
    return bool(sources) and all(source.name in judged for source in sources)


def _sources(config: RunConfig) -> Iterator[Finding]:
    data = config.data
    for sections, files in (("sources", "train_files"), ("val_sources", "val_files")):
        if getattr(data, sections) is not None and getattr(data, files) is not None:
            yield f"data.{sections}", f"stands in place of data.{files}; set one of them"
    if data.train_probs is not None:
        entries = len(data.train_files) if isinstance(data.train_files, list) else int(data.train_files is not None)
        if len(data.train_probs) != entries:
            yield "data.train_probs", f"must have one number for each of the {entries} entries of data.train_files"
        elif abs(sum(data.train_probs) - 1) > 1e-6:
            yield "data.train_probs", f"must add up to 1, not to {sum(data.train_probs):g}"
    weights = [source.weight for source in training_sources(data)]
    if None in weights and any(weights):
        yield "data.sources", "must all have a weight, or none of them"
    for key, named in (("sources", training_sources(data)), ("val_sources", validation_sources(data))):
        if any(not source.files for source in named):
            yield f"data.{key}", "has a source whose files are an empty list"
        if len({source.name for source in named}) < len(named):
            yield f"data.{key}", "has two sources of one name"
    own = {source.name: _reward_of(source) for source in training_sources(data) if source.reward_function}
    for source in validation_sources(data):
        if source.reward_function and own.get(source.name, _reward_of(source)) != _reward_of(source):
            yield "data.val_sources", f"has a source {source.name!r} with another reward than in training; rename it"


def _reward_of(source: Source) -> tuple[str | None, dict[str, Any]]:
    return source.reward_function, source.reward_function_kwargs


def _batches(config: RunConfig) -> Iterator[Finding]:
    data = config.data
    mini = data.mini_rollout_batch_size
    if mini is not None and data.rollout_batch_size % mini:
        yield (
            "data.mini_rollout_batch_size",
            f"must divide data.rollout_batch_size ({data.rollout_batch_size}); "
            f"{_nearest_divisors(data.rollout_batch_size, mini)} would do",
        )
    if data.val_batch_size == 0 or data.val_batch_size < -1:
        yield "data.val_batch_size", "must be at least 1, or -1 for all at once"


def _critic(config: RunConfig, provenance: Provenance) -> Iterator[Finding]:
    """What is wrong with the critic's own batches; those that it has of the actor are held against the actor."""
    if config.has_critic:
        found = _optimizer_batches(config, "critic")
        yield from (finding for finding in found if provenance.is_set(finding[0]))


def _optimizer_batches(config: RunConfig, name: Literal["actor", "critic"]) -> Iterator[Finding]:
    owner: UpdateConfig = getattr(config.worker, name)
    n, prompts = config.worker.rollout.n, config.data.rollout_batch_size
    replicas = config.data_ranks(name)
    update, step = owner.global_batch_size * n, prompts * n
    if prompts % owner.global_batch_size:
        divisors = _nearest_divisors(prompts, owner.global_batch_size)
        message = f"must divide data.rollout_batch_size ({prompts}); {divisors} would do"
        yield f"worker.{name}.global_batch_size", message
    if update % replicas:
        yield (
            f"worker.{name}.global_batch_size",
            f"× worker.rollout.n ({n}) = {update} sequences must be a multiple of the {replicas} data-parallel devices",
        )
    elif not owner.dynamic_batching:
        micro = owner.micro_batch_size_per_device_for_update
        if isinstance(micro, int) and update // replicas % micro:
            yield (
                f"worker.{name}.micro_batch_size_per_device_for_update",
                f"must divide the {update // replicas} sequences per device and optimizer step "
                f"(global_batch_size × n ÷ devices); {_nearest_divisors(update // replicas, micro)} would do, "
                f"or set worker.{name}.dynamic_batching=true",
            )
        micro = owner.micro_batch_size_per_device_for_experience
        if isinstance(micro, int) and step // replicas % micro:
            yield (
                f"worker.{name}.micro_batch_size_per_device_for_experience",
                f"must divide the {step // replicas} sequences per device and step (rollout_batch_size × n ÷ devices); "
                f"{_nearest_divisors(step // replicas, micro)} would do, or set worker.{name}.dynamic_batching=true",
            )


def _parallel(config: RunConfig, provenance: Provenance) -> Iterator[Finding]:
    devices, rollout, actor = config.trainer.devices, config.worker.rollout, config.worker.actor
    shown = f"(trainer.nnodes × trainer.n_gpus_per_node = {devices})"
    yield from sequence_problems(config)
    size = actor.fsdp.fsdp_size
    if devices > 1 and size != -1 and (size < 1 or devices % size):
        yield "worker.actor.fsdp.fsdp_size", f"must divide the number of devices {shown}, or be -1 for all of them"
    yield from engine_problems(config, provenance)
    longest = config.data.max_prompt_length + config.data.max_response_length
    lengths = f"data.max_prompt_length + data.max_response_length ({longest})"
    if rollout.name == "vllm" and not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        yield "worker.rollout.max_num_batched_tokens", f"must be at least {lengths}"
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield "worker.rollout.max_model_len", f"must be at least {lengths}, or null"


def _secrets(config: RunConfig) -> Iterator[Problem]:
    for key in masked_keys(config):
        again = "name a configuration file that has it, as config=FILE" if "[" in key else f"give it again, as +{key}=…"
        yield Problem(key, f"a secret, which is masked in what a run saves of its configuration: {again}")


def _pixels(config: RunConfig) -> Iterator[Finding]:
    data = config.data
    ranges = {"data.": (data.min_pixels, data.max_pixels)}
    if data.video_min_pixels or data.video_max_pixels:
        ranges["data.video_"] = (data.video_min_pixels or data.min_pixels, data.video_max_pixels or data.max_pixels)
    for key, (least, most) in ranges.items():
        if least is not None and most is not None and least > most:
            yield f"{key}min_pixels", f"must be at most {key}max_pixels ({most})"


def _algorithm(config: RunConfig) -> Iterator[Finding]:
    clip = config.algorithm.reward_clip_range
    if clip is not None and clip[0] > clip[1]:
        yield "algorithm.reward_clip_range", "must be the lower and then the upper end"
    if config.worker.rollout.temperature == 0:
        yield "worker.rollout.temperature", "must be above 0 in training: greedy answers to one prompt are all the same"
    samples = config.data.rollout_batch_size * config.worker.rollout.n
    if config.algorithm.kl_type == "adaptive" and config.algorithm.kl_horizon <= MAX_ERROR * samples:
        least = f"the {samples} samples of a step take more than {MAX_ERROR * samples:g}"
        yield "algorithm.kl_horizon", f"is too short: {least}, or the coefficient would fall to 0"
    keys, weights = lookup(config, "algorithm.gdpo_reward_keys"), lookup(config, "algorithm.gdpo_reward_weights")
    if weights is not None and (keys is None or len(keys) != len(weights)):
        yield "algorithm.gdpo_reward_weights", "needs algorithm.gdpo_reward_keys, as many as there are weights"
    high = lookup(config, "worker.actor.clip_cov_ub")
    if lookup(config, "worker.actor.clip_cov_lb") >= high:
        yield "worker.actor.clip_cov_lb", f"must be less than worker.actor.clip_cov_ub ({high})"


def _needs(config: RunConfig) -> Iterator[Finding]:
    """What the estimator and the loss need and the rest of the configuration does not give."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    needs = needs_of(catalogue.estimators(), name)
    if "groups" in needs and config.worker.rollout.n < 2:
        yield "worker.rollout.n", f"algorithm.adv_estimator={name} compares the answers to one prompt: at least 2"
    if "parts" in needs and not (algorithm.use_kl_loss or algorithm.disable_kl):
        yield "algorithm.use_kl_loss", f"adv_estimator={name} has no place for a KL in the reward, set true"
    loss = config.worker.actor.loss_type
    for key, wants in (
        ("algorithm.adv_estimator", needs),
        ("worker.actor.loss_type", needs_of(catalogue.losses(), loss)),
    ):
        if {"ref_logprobs", "full_kl"} & set(wants) and algorithm.disable_kl:
            yield "algorithm.disable_kl", f"{key}={lookup(config, key)} needs the reference: set false"


def _ranges(config: RunConfig) -> Iterator[Finding]:
    """Settings of the estimator and the loss that lie outside their range; of the others, if none would take them."""
    for options, chosen in (
        (ESTIMATOR_OPTIONS, config.algorithm.adv_estimator),
        (LOSS_OPTIONS, config.worker.actor.loss_type),
    ):
        for option in options:
            value = lookup(config, option.key)
            owners = [option.owners[chosen]] if chosen in option.owners else option.owners.values()
            faults = [fault(owner.type, value) for owner in owners]
            if value is not None and all(faults):
                yield option.key, str(faults[0])


def _filter(config: RunConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if not algorithm.online_filtering:
        return
    if algorithm.filter_mode == "default" and algorithm.filter_low >= algorithm.filter_high:
        yield "algorithm.filter_low", f"must be less than algorithm.filter_high ({algorithm.filter_high})"
    if algorithm.filter_mode == "ema_std" and algorithm.filter_start_step <= algorithm.filter_ema_start_step:
        yield (
            "algorithm.filter_start_step",
            f"must be more than algorithm.filter_ema_start_step ({algorithm.filter_ema_start_step}): "
            "without a step to go by there is no threshold",
        )
    if algorithm.filter_mode != "default" and config.worker.rollout.n < 2:
        yield (
            "worker.rollout.n",
            f"algorithm.filter_mode={algorithm.filter_mode} compares the answers to one prompt: at least 2",
        )


def _rejections(config: RunConfig) -> Iterator[Finding]:
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.rollout_rs_threshold"
    rules, thresholds = correction.rollout_rs, correction.rollout_rs_threshold
    if not rules:
        return
    if not thresholds:
        yield key, "is missing: the bound of rollout_rs, such as 0.5_2.0 for a k1 and 0.01 for a k3"
    elif len(thresholds) not in (1, len(rules)):
        yield key, f"must be one threshold for all, or one for each of the {len(rules)} in rollout_rs"
    else:
        for rule, threshold in zip(rules, thresholds * (len(rules) // len(thresholds)), strict=True):
            lower, upper = bounds(threshold)
            if not rule.endswith("k1") and lower is not None:
                yield key, f"must be a single upper bound for {rule}, which is never negative"
            if rule.endswith("k1") and lower is None and upper < 1:
                yield key, f"must be at least 1 for {rule}: the ratio is kept within [1 / threshold, threshold]"


def _overlong_buffer(config: RunConfig) -> Iterator[Finding]:
    buffer, longest = config.worker.reward.overlong_buffer, config.data.max_response_length
    key = "worker.reward.overlong_buffer.len"
    if buffer.enable and buffer.len is None:
        yield key, f"is missing: how many of data.max_response_length ({longest}) tokens begin to cost; DAPO: a fifth"
    elif buffer.enable and buffer.len is not None and buffer.len > longest:
        yield key, f"must be at most data.max_response_length ({longest})"


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


def _adapter(config: RunConfig) -> Iterator[Finding]:
    actor = config.worker.actor
    lora = actor.model.lora
    yield from _quantization(config)
    if not lora.used:
        return
    if not find_spec("peft"):
        yield "worker.actor.model.lora", "needs peft: install r1-cli[lora]"
    if actor.optim.strategy == "adamw_bf16":
        yield "worker.actor.optim.strategy", "trains bf16 weights, and an adapter's factors are fp32; set adamw"
    if lora.path and not (Path(lora.path) / "adapter_config.json").is_file():
        yield "worker.actor.model.lora.path", "is no folder with an adapter_config.json"


def _quantization(config: RunConfig) -> Iterator[Finding]:
    key, model = "worker.actor.model.quantization", config.worker.actor.model
    if model.quantization is None:
        return
    if not model.lora.used:
        yield key, "keeps weights that are not trained; set worker.actor.model.lora.rank"
    if not find_spec("bitsandbytes"):
        yield key, "needs bitsandbytes: install r1-cli[qlora]"
    if config.worker.rollout.name == "vllm" or config.worker.rollout.servers.used:
        yield key, "needs worker.rollout.name=embedded, whose weights are made of the same 4 bits"


def _trainer(config: RunConfig) -> Iterator[Finding]:
    trainer = config.trainer
    if trainer.val_only and not validation_sources(config.data):
        yield "trainer.val_only", "needs data.val_files"
    if trainer.max_try_make_batch == 0 or trainer.max_try_make_batch < -1:
        yield "trainer.max_try_make_batch", "must be at least 1, or -1 for no limit"


def _nearest_divisors(total: int, wanted: int) -> str:
    """Return the divisors of `total` next to `wanted`, as text."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))
