"""Tiny models on disk with adapters, and the learners that train them, in float64, in one process or in ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import core_models
import torch
from core_models import picture_samples, qwen2, qwen25_vl, text_samples, with_siblings
from core_ranks import ONE_BY_ONE, SHARING
from ranks import patches
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from r1_cli.build.adapter import AdaptedLearner, build_adaptation
from r1_cli.models.adapters import Adapters, Form
from r1_cli.models.load import load_config, load_model
from r1_core.advantages import GRPO, assign
from r1_core.learner.offload import Offload
from r1_core.learner.optim import RateGroup, build_optimizer
from r1_core.learner.parallel import Parallel, full_tensor
from r1_core.objective import Objective
from r1_core.types import Sample

NAMES = ("text", "pictures")
OBJECTIVES = {
    "KL": Objective(kl_penalty="low_var_kl", kl_coef=0.1),
    "full KL": Objective(kl_penalty="full", kl_coef=0.1),
}


def _norm(self: Any, hidden: Tensor) -> Tensor:
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)


def compute_exactly() -> None:
    """Let models of float64 nowhere round to float32, until the patches are undone."""
    patches.undo()
    norms = {modeling_qwen2.Qwen2RMSNorm}
    norms |= {found for name, found in vars(modeling_qwen2_5_vl).items() if name.endswith("RMSNorm")}
    for norm in norms:
        patches.setattr(norm, "forward", _norm)
    patches.setattr(modeling_qwen2_5_vl, "apply_rotary_pos_emb_vision", core_models._rotate_vision)


def make_folders(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a base, and an adapter of it as peft writes it, none of whose factors is zero."""
    from peft import LoraConfig, get_peft_model

    base, adapter = folder / "base", folder / "adapter"
    model: Any = (qwen2 if name == "text" else qwen25_vl)(0)
    if name == "pictures":
        model.config.video_token_id = 59
    model.save_pretrained(base)
    torch.manual_seed(5)
    excluded = None if name == "text" else ".*visual.*"
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=excluded)
    peft_model = get_peft_model(model, config)
    for key, param in peft_model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(param, std=0.1)
    peft_model.save_pretrained(adapter)
    return base, adapter


def build(
    base: Path,
    form: Form,
    parallel: Parallel | None = None,
    *,
    separate: bool = False,
    dtype: torch.dtype = torch.float64,
    groups: Sequence[RateGroup] = (),
    offload: Offload | None = None,
) -> AdaptedLearner:
    """A learner of an adapter; its reference is the base without it, or, if `separate`, a model of its own.

    Ranks share prompts, one process does not.
    """
    adapters, device = Adapters(form), torch.device("cpu")
    config = load_config(str(base))
    policy = load_model(str(base), config=config, dtype=dtype, device=device, parallel=parallel, adapters=adapters)
    reference = load_model(str(base), config=config, dtype=dtype, device=device, parallel=parallel)
    if dtype == torch.float64:
        compute_exactly()
        policy.double()  # the factors, too
    return AdaptedLearner(
        adapters, policy, build_optimizer(policy.named_parameters(), lr=1e-2, groups=groups), lambda step: 1.0,
        reference=reference if separate else policy, batching=ONE_BY_ONE if parallel is None else SHARING,
        max_grad_norm=0.5, parallel=parallel, device=device,
        fillers=picture_samples((1,), seed=9) if hasattr(config, "vision_config") else (),
        adaptation=build_adaptation(adapters, policy, str(base), dtype), offload=offload,
    )  # fmt: skip


def step_samples(name: str, seed: int = 1) -> list[Sample]:
    """Text, or one prompt with pictures, so that most micro-batches have none. Some have a prompt in common."""
    return with_siblings(text_samples(seed=seed) if name == "text" else picture_samples((0, 0, 2, 0, 0), seed=seed))


def take_step(learner: AdaptedLearner, name: str, objective: str, seed: int = 1) -> dict[str, float]:
    """One step off policy, with all that it measures; the mean KL from the reference is among the metrics."""
    samples = learner.add_logprobs(step_samples(name, seed), ["old_logprobs", "full_kl", "ref_logprobs"])
    moved = [replace(s, old_logprobs=s.old_logprobs + 0.1) for s in samples if s.old_logprobs is not None]
    metrics = learner.forward_backward(assign(moved, GRPO()), OBJECTIVES[objective])
    return metrics | learner.optim_step()


def learn(base: Path, adapter: Path, name: str, shard_size: int | None = None) -> tuple[Any, dict[str, Tensor]]:
    """A case for ranks: the metrics of three steps, and the factors after them."""
    parallel = None if shard_size is None else Parallel.join("cpu", shard_size=shard_size)
    learner = build(base, Form(4, 8, "all-linear", ".*visual.*", adapter), parallel)
    metrics = [take_step(learner, name, objective, seed) for seed, objective in enumerate(["KL", "full KL", "KL"])]
    return metrics, {key: tensor.clone() for key, tensor in learner.weights()}


def first_factors(base: Path, shard_size: int) -> dict[str, Tensor]:
    """A case for ranks: what factors begin with."""
    learner = build(base, Form(4, 8, "all-linear", ".*visual.*"), Parallel.join("cpu", shard_size=shard_size))
    return {key: tensor.clone() for key, tensor in learner.weights()}


def save_and_resume(base: Path, adapter: Path, folder: Path) -> bool:
    """A case for ranks: whether a learner that has loaded a checkpoint takes the next step to the bit."""
    form, parallel = Form(4, 8, "all-linear", ".*visual.*", adapter), Parallel.join("cpu")
    learner = build(base, form, parallel)
    take_step(learner, "text", "KL")
    learner.save(folder)
    resumed = build(base, replace(form, start=None), parallel)
    resumed.load(folder)
    same = take_step(resumed, "text", "full KL", 2) == take_step(learner, "text", "full KL", 2)
    return same and all(a[1].equal(b[1]) for a, b in zip(resumed.weights(), learner.weights(), strict=True))


def half_precision(base: Path) -> dict[str, Any]:
    """A case for ranks: a base in bfloat16 beside factors in float32, computing in bfloat16."""
    from r1_core.learner.parallel import Shard

    patches.undo()
    parallel = Parallel.join("cpu")
    adapters, device = Adapters(Form(4, 8, "all-linear", None)), torch.device("cpu")
    shard = Shard(torch.bfloat16, torch.float32)
    policy = load_model(
        str(base), config=load_config(str(base)), dtype=torch.bfloat16, device=device, parallel=parallel, shard=shard,
        adapters=adapters,
    )  # fmt: skip
    learner = AdaptedLearner(
        adapters, policy, build_optimizer(policy.named_parameters(), lr=1e-2), lambda step: 1.0, reference=policy,
        parallel=parallel, device=device, adaptation=build_adaptation(adapters, policy, str(base), torch.bfloat16),
    )  # fmt: skip
    metrics = take_step(learner, "text", "KL")
    kinds = {str(p.dtype): p.requires_grad for _, p in policy.named_parameters()}
    states = {str(s["exp_avg"].dtype) for s in learner.optimizer.state.values()}
    return metrics | {"kinds": kinds, "states": states, "moved": _moved(learner)}


def _moved(learner: AdaptedLearner) -> bool:
    return any(full_tensor(tensor).abs().max() > 0 for name, tensor in learner.weights() if "lora_B" in name)
