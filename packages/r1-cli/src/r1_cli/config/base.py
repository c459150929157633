"""Whether an engine samples from the very weights that a learner's adapter stands on, or has a copy of them."""

from r1_cli.config.engines import engine_module
from r1_cli.config.root import RunConfig


def why_copied(config: RunConfig, *, on_gpu: bool) -> str | None:
    """Return why an engine of an adapter's base has a copy of its own; None if it shares the learner's weights."""
    actor, rollout = config.worker.actor, config.worker.rollout
    kept = actor.fsdp.mp_param_dtype if on_gpu and actor.kept_dtype == "fp32" else actor.kept_dtype
    sampled = rollout.dtype if on_gpu else "fp32"
    if engine_module(rollout.engine) is not engine_module("embedded"):
        return "only the embedded engine samples from the learner's"
    if config.on_cluster or config.trainer.max_staleness:
        return "it is in a process of its own"
    if actor.model.quantization is not None:
        return f"the learner's is in 4 bits (worker.actor.model.quantization={actor.model.quantization})"
    if on_gpu and actor.fsdp.enable_cpu_offload:
        return "the learner's is in the processor's memory (worker.actor.fsdp.enable_cpu_offload=true)"
    if kept != sampled:
        return f"it samples in {sampled}, and the learner's is in {kept}"
    return None


def shares_base(config: RunConfig, *, on_gpu: bool) -> bool:
    """Whether an adapter is trained, and engine and learner have one base."""
    return config.worker.actor.model.lora.used and why_copied(config, on_gpu=on_gpu) is None
