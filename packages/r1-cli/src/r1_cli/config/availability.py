"""What this version cannot do yet, and which options it reads but has no use for: one table each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r1_cli.config.provenance import Provenance
from r1_cli.config.root import RunConfig, lookup
from r1_cli.config.schema import schema

Applies = Callable[[Any, RunConfig], bool]  # (the key's value, the configuration)


@dataclass(frozen=True, slots=True)
class Limit:
    """One option that is not served, with the reason and what to do instead."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


class UnavailableError(ValueError):
    """A correct configuration that asks for what this version cannot do; the message names each option."""

    def __init__(self, limits: list[Limit]) -> None:
        self.limits = tuple(limits)
        super().__init__("\n".join(f"{limit} is not available in this version ({limit.reason})" for limit in limits))


def _uses_kl(config: RunConfig) -> bool:
    return not config.algorithm.disable_kl


NOT_YET: tuple[tuple[str, Applies, str], ...] = (
    ("algorithm.adv_estimator", lambda v, c: v in ("gae", "gdpo"), "there is no critic, set another estimator"),
    ("algorithm.kl_penalty", lambda v, c: v == "full" and _uses_kl(c), "set kl, abs, mse, low_var_kl, k1+ or k3+"),
    ("worker.actor.ulysses_size", lambda v, c: v > 1, "one device, set 1"),
    ("worker.actor.fsdp.enable_cpu_offload", lambda v, c: v, "one device, set false"),
    ("worker.actor.fsdp.torch_dtype", lambda v, c: v == "fp16", "losses are not scaled, set bf16 or null"),
    ("worker.actor.fsdp.mp_param_dtype", lambda v, c: v == "fp16", "losses are not scaled, set bf16 or fp32"),
    ("worker.actor.model.lora.rank", lambda v, c: v > 0, "all weights are trained, set 0"),
    ("worker.rollout.name", lambda v, c: v == "vllm", "set auto, which takes the embedded engine"),
    ("trainer.nnodes", lambda v, c: v > 1, "one device, set 1"),
    ("trainer.n_gpus_per_node", lambda v, c: v > 1, "one device, set 1"),
    ("trainer.ray_timeline", lambda v, c: v is not None, "runs in one process, set null"),
)
# Refused where the user asks for it; as a mere default it means nothing on one device.
NOT_YET_WHEN_SET: tuple[tuple[str, Applies, str], ...] = (
    ("worker.rollout.tensor_parallel_size", lambda v, c: v > 1, "the engine runs on one device, set 1"),
)
DISCOUNTED = ("gae", "reinforce_plus_plus")
NO_EFFECT: dict[str, str] = {
    "data.filter_overlong_prompts_workers": "lengths are checked in one process",
    "data.video_fps": "videos are not read",
    "worker.hybrid_engine": "one process both samples and trains",
    "worker.actor.strategy": "one device, nothing to shard",
    "worker.actor.fsdp.enable_full_shard": "one device, nothing to shard",
    "worker.actor.fsdp.enable_rank0_init": "one device, nothing to shard",
    "worker.actor.fsdp.fsdp_size": "one device, nothing to shard",
    "worker.actor.fsdp.use_orig_params": "one device, nothing to shard",
    "worker.actor.fsdp.mp_reduce_dtype": "one device, nothing to reduce",
    "worker.actor.fsdp.mp_buffer_dtype": "buffers keep the model's own precision",
    "worker.ref": "the reference is loaded like the actor",
    "worker.rollout.gpu_memory_utilization": "the embedded engine takes what it needs",
    "worker.rollout.max_num_batched_tokens": "the embedded engine batches by itself",
    "worker.rollout.max_model_len": "the embedded engine goes as far as the prompt and response lengths",
    "worker.rollout.enforce_eager": "the embedded engine is always eager",
    "worker.rollout.enable_chunked_prefill": "the embedded engine fills prompts in one go",
    "worker.rollout.limit_images": "the embedded engine takes any number of pictures",
    "worker.rollout.disable_log_stats": "the embedded engine prints none",
    "worker.rollout.disable_tqdm": "the progress bar is r1's own",
}
# On by default, so shown only where the user asks for them.
NO_EFFECT_WHEN_SET: dict[str, str] = {
    "worker.actor.offload.offload_params": "weights stay on the device while the engine samples",
    "worker.actor.offload.offload_optimizer": "optimizer states stay on the device while the engine samples",
    "worker.actor.use_torch_compile": "log-probs are computed eagerly",
}
CONDITIONAL: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    ("worker.critic", lambda c: c.algorithm.adv_estimator != "gae", "only gae has a critic"),
    ("trainer.critic_warmup", lambda c: c.algorithm.adv_estimator != "gae", "only gae has a critic"),
    (
        "algorithm.gamma",
        lambda c: c.algorithm.adv_estimator not in DISCOUNTED,
        "only gae and reinforce_plus_plus discount",
    ),
    ("algorithm.lam", lambda c: c.algorithm.adv_estimator != "gae", "only gae uses it"),
    ("algorithm.kl_horizon", lambda c: c.algorithm.kl_type == "fixed", "only kl_type=adaptive uses it"),
    ("algorithm.kl_target", lambda c: c.algorithm.kl_type == "fixed", "only kl_type=adaptive uses it"),
    ("worker.actor.tau_positive", lambda c: c.worker.actor.loss_type != "sapo", "only loss_type=sapo uses it"),
    ("worker.actor.tau_negative", lambda c: c.worker.actor.loss_type != "sapo", "only loss_type=sapo uses it"),
)


def unavailable(config: RunConfig, provenance: Provenance) -> list[Limit]:
    """Return what the configuration asks for and this version cannot do; a run refuses it, a dry run lists it."""
    asked = [rule for rule in NOT_YET_WHEN_SET if provenance.is_set(rule[0])]
    return [
        Limit(key, lookup(config, key), reason)
        for key, applies, reason in (*NOT_YET, *asked)
        if applies(lookup(config, key), config)
    ]


def require_available(config: RunConfig, provenance: Provenance) -> None:
    """Refuse a run that this version cannot do as it is written.

    Raises:
        UnavailableError: names every such option at once.
    """
    limits = unavailable(config, provenance)
    if limits:
        raise UnavailableError(limits)


def without_effect(config: RunConfig, provenance: Provenance) -> list[Limit]:
    """Return the options that ask for something although nothing reads them here; they are shown, not refused."""
    default = RunConfig()
    reasons = dict(NO_EFFECT) | {key: why for key, applies, why in CONDITIONAL if applies(config)}
    changed = [
        (key, reason)
        for section, reason in reasons.items()
        for key in schema().values
        if (key == section or key.startswith(f"{section}.")) and lookup(config, key) != lookup(default, key)
    ]
    asked = [(key, why) for key, why in NO_EFFECT_WHEN_SET.items() if provenance.is_set(key) and lookup(config, key)]
    return [Limit(key, lookup(config, key), reason) for key, reason in changed + asked]
