"""What this version cannot do yet, and which options it reads but has no use for: one table each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r1_cli.config.base import shares_base
from r1_cli.config.engines import engine_module
from r1_cli.config.errors import ConfigError, Problem
from r1_cli.config.options import ESTIMATOR_OPTIONS, LOSS_OPTIONS, Option
from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig, lookup
from r1_cli.config.schema import schema
from r1_cli.config.sources import training_sources
from r1_cli.config.worker import FSDPConfig, LoraConfig

Applies = Callable[[Any, RunConfig], bool]  # (the key's value, the configuration)


@dataclass(frozen=True, slots=True)
class Limit:
    """One option that is not served, with the reason and what to do instead."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def _has_critic(config: RunConfig) -> bool:
    return config.has_critic


def _shares(config: RunConfig) -> bool:
    """Whether a critic has others to share sequences with; without one its whole section is not read."""
    return config.trainer.devices > 1 or not config.has_critic


NOT_YET: tuple[tuple[str, Applies, str], ...] = (
    ("worker.actor.fsdp.torch_dtype", lambda v, c: v == "fp16", "losses are not scaled, set bf16 or null"),
    ("worker.actor.fsdp.mp_param_dtype", lambda v, c: v == "fp16", "losses are not scaled, set bf16 or fp32"),
    ("worker.critic.fsdp.torch_dtype", lambda v, c: c.has_critic and v == "fp16", "losses are not scaled, set bf16"),
    ("worker.critic.fsdp.mp_param_dtype", lambda v, c: c.has_critic and v == "fp16", "losses are not scaled, set bf16"),
    ("worker.critic.optim.groups", lambda v, c: c.has_critic and v, "the critic has one learning rate, set []"),
    ("worker.critic.model.lora.rank", lambda v, c: c.has_critic and v > 0, "all the critic's weights train, set 0"),
    ("worker.critic.model.lora.path", lambda v, c: c.has_critic and v, "all the critic's weights train, set null"),
    ("worker.critic.model.quantization", lambda v, c: c.has_critic and v, "the critic's weights train, set null"),
)
# Refused where the user asks for it; as a mere default it means nothing on one device.
NOT_YET_WHEN_SET: tuple[tuple[str, Applies, str], ...] = (
    (
        "worker.rollout.tensor_parallel_size",
        lambda v, c: v > 1 and not c.on_cluster and not c.worker.rollout.servers.used,
        "the engine runs on one device, set 1",
    ),
)
NO_EFFECT: dict[str, str] = {
    "worker.hybrid_engine": "one process both samples and trains",
    "worker.actor.strategy": "both names mean FSDP2",
    "worker.actor.fsdp.enable_rank0_init": "each rank reads its own rows of the model's files",
    "worker.actor.fsdp.use_orig_params": "FSDP2 always does",
    "worker.actor.fsdp.mp_buffer_dtype": "buffers keep the model's own precision",
    "worker.ref.strategy": "both names mean FSDP2",
    "worker.ref.offload.offload_optimizer": "the reference is not trained",
    **{
        f"worker.ref.fsdp.{key}": "the reference computes in what the actor does, on the ranks that it has"
        for key in FSDPConfig.model_fields
        if key not in ("enable_cpu_offload", "enable_full_shard")
    },
    "worker.rollout.disable_tqdm": "the progress bar is r1's own",
}
CRITIC_NO_EFFECT: dict[str, str] = {
    "worker.critic.strategy": "both names mean FSDP2",
    "worker.critic.model.tokenizer_path": "it reads the tokens that the actor does",
    **{
        f"worker.critic.model.lora.{key}": "all the critic's weights train"
        for key in LoraConfig.model_fields
        if key not in ("rank", "path")
    },
    "worker.critic.fsdp.enable_rank0_init": "each rank reads its own rows of the model's files",
    "worker.critic.fsdp.use_orig_params": "FSDP2 always does",
    "worker.critic.fsdp.mp_buffer_dtype": "buffers keep the model's own precision",
    "worker.critic.fsdp.fsdp_size": "the critic is cut over the ranks as the actor is",
}
# On by default, so shown only where the user asks for them.
NO_EFFECT_WHEN_SET: dict[str, str] = {
    "worker.actor.use_torch_compile": "log-probs are computed eagerly",
}

# Allowed, and seldom meant: said where the user sets them.
SELDOM_MEANT: tuple[tuple[str, Applies, str], ...] = (
    ("worker.actor.optim.lr", lambda v, c: v == 0, "no weight changes"),
    ("trainer.save_freq", lambda v, c: v == 0, "as -1, no checkpoint is written"),
    ("trainer.val_freq", lambda v, c: v == 0, "as -1, nothing is validated between steps"),
    (
        "trainer.critic_warmup",
        lambda v, c: c.has_critic and c.trainer.max_steps is not None and v >= c.trainer.max_steps,
        "the actor is never updated",
    ),
    *(
        (
            f"worker.actor.offload.{key}",
            lambda v, c: v and not c.shares_devices,
            "nobody else is where the actor learns",
        )
        for key in ("offload_params", "offload_optimizer")
    ),
    (
        "worker.actor.offload.offload_params",
        lambda v, c: v and shares_base(c, on_gpu=True),
        "the embedded engine samples from the adapter's base, which stays",
    ),
    (
        "worker.ref.offload.offload_params",
        lambda v, c: v and c.worker.ref.fsdp.enable_cpu_offload,
        "worker.ref.fsdp.enable_cpu_offload keeps the reference off the device anyhow",
    ),
)


def _filters_by(mode: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.algorithm.online_filtering and config.algorithm.filter_mode == mode


# Keys that are read in some configurations only: when, and the reason to give otherwise.
READ_WHEN: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    ("data.stopping_strategy", lambda c: any(s.weight for s in training_sources(c.data)), "no source has a weight"),
    ("worker.actor.fsdp.fsdp_size", lambda c: c.trainer.devices > 1, "one device, nothing to shard"),
    ("worker.rollout.engines", lambda c: not c.worker.rollout.servers.used, "servers sample"),
    ("trainer.ray_timeline", lambda c: c.on_cluster, "one device, no Ray"),
    ("worker.actor.ulysses_size", lambda c: c.trainer.devices > 1, "one device, nobody to share sequences with"),
    ("worker.critic.ulysses_size", _shares, "one device, nobody to share sequences with"),
    ("trainer.collective_timeout", lambda c: c.trainer.devices > 1, "one device, nobody to wait for"),
    *(
        (f"worker.actor.model.lora.{key}", lambda c: not c.worker.actor.model.lora.path, "lora.path's own holds")
        for key in ("alpha", "target_modules", "exclude_modules")
    ),
    *(
        (f"worker.actor.model.lora.{key}", lambda c: c.worker.actor.model.lora.used, "lora.rank is 0")
        for key in ("alpha", "target_modules", "exclude_modules")
    ),
    *(
        (
            f"worker.{owner}.model.enable_activation_offload",
            lambda c, owner=owner: getattr(c.worker, owner).model.enable_gradient_checkpointing,
            "it is for checkpointed layers, set enable_gradient_checkpointing",
        )
        for owner in ("actor", "critic")
    ),
    ("worker.critic", _has_critic, "the estimator needs no critic"),
    ("trainer.critic_warmup", _has_critic, "the estimator needs no critic"),
    ("algorithm.kl_horizon", lambda c: c.algorithm.kl_type == "adaptive", "only kl_type=adaptive uses it"),
    ("algorithm.kl_target", lambda c: c.algorithm.kl_type == "adaptive", "only kl_type=adaptive uses it"),
    *(
        (f"algorithm.{name}", lambda c: c.algorithm.online_filtering, "only online_filtering=true uses it")
        for name in ("filter_mode", "filter_key", "surplus_max_age")
    ),
    *(
        (f"algorithm.{name}", _filters_by("default"), "only online_filtering=true with filter_mode=default uses it")
        for name in ("filter_low", "filter_high")
    ),
    *(
        (f"algorithm.{name}", _filters_by("ema_std"), "only online_filtering=true with filter_mode=ema_std uses it")
        for name in ("filter_ema_ratio", "filter_ema_start_step", "filter_start_step", "std_filter_beta")
    ),
    (
        "worker.actor.loss_scale_factor",
        lambda c: c.worker.actor.loss_avg_mode == "seq-mean-token-sum-norm",
        "only loss_avg_mode=seq-mean-token-sum-norm uses it",
    ),
    (
        "worker.actor.optim.num_cycles",
        lambda c: c.worker.actor.optim.lr_scheduler_type == "cosine",
        "only lr_scheduler_type=cosine uses it",
    ),
    (
        "algorithm.rollout_correction.rollout_is_threshold",
        lambda c: c.importance_weights is not None,
        "only rollout_is uses it",
    ),
    (
        "algorithm.rollout_correction.rollout_rs_threshold",
        lambda c: bool(c.algorithm.rollout_correction.rollout_rs),
        "only rollout_rs uses it",
    ),
    ("worker.reward.overlong_buffer", lambda c: c.worker.reward.overlong_buffer.enable, "set its enable to true"),
)


def _not_read(config: RunConfig) -> dict[str, str]:
    """Return the keys and sections that this configuration never looks at, and why."""
    estimator, loss = config.algorithm.adv_estimator, config.worker.actor.loss_type
    unread = {key: why for key, read, why in READ_WHEN if not read(config)}
    unread |= {f"worker.rollout.{key}": why for key, why in engine_module(config.worker.rollout.engine).IGNORES.items()}
    unread |= {option.key: _only(option) for option in ESTIMATOR_OPTIONS if estimator not in option.owners}
    unread |= {option.key: _only(option) for option in LOSS_OPTIONS if loss not in option.owners}
    unread.pop("algorithm.reward_clip_range", None)  # other estimators are given clipped rewards
    return unread


def _only(option: Option) -> str:
    return f"only {', '.join(option.owners)} {'uses' if len(option.owners) == 1 else 'use'} it"


def unavailable(config: RunConfig, provenance: Provenance) -> list[Limit]:
    """Return what the configuration asks for and this version cannot do."""
    asked = [rule for rule in NOT_YET_WHEN_SET if provenance.is_set(rule[0])]
    missing = engine_module(config.worker.rollout.engine).missing()
    absent = [Limit("worker.rollout.name", config.worker.rollout.name, missing)] if missing else []
    return absent + [
        Limit(key, lookup(config, key), reason)
        for key, applies, reason in (*NOT_YET, *asked)
        if applies(lookup(config, key), config)
    ]


def require_available(config: RunConfig, provenance: Provenance) -> None:
    """Refuse a run that this version cannot do as it is written.

    Raises:
        ConfigError: names every such option at once.
    """
    problems = [
        Problem(
            limit.key,
            f"is not available in this version: {limit.reason}",
            str(limit.value),
            provenance.origins.get(limit.key, "default"),
        )
        for limit in unavailable(config, provenance)
    ]
    if problems:
        raise ConfigError(problems)


def without_effect(config: RunConfig, provenance: Provenance) -> list[Limit]:
    """Return the options that ask for something although nothing reads them here; they are shown, not refused."""
    default = RunConfig()
    reasons = NO_EFFECT | (CRITIC_NO_EFFECT if config.has_critic else {}) | _not_read(config)
    changed = [
        (key, reason)
        for section, reason in reasons.items()
        for key in schema().values
        if (key == section or key.startswith(f"{section}.")) and lookup(config, key) != lookup(default, key)
    ]
    asked = [(key, why) for key, why in NO_EFFECT_WHEN_SET.items() if provenance.is_set(key) and lookup(config, key)]
    odd = [(key, why) for key, odd, why in SELDOM_MEANT if provenance.is_set(key) and odd(lookup(config, key), config)]
    return [Limit(key, lookup(config, key), reason) for key, reason in changed + asked + odd]
