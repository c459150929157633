"""Optimizers by name, a step of one, and the learning rate over the steps of a run."""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import nn

from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.parallel import total_norm

Schedule = Literal["constant", "cosine", "linear"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
STRATEGIES = {"adamw": torch.optim.AdamW, "adamw_bf16": AdamWBF16}


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    strategy: str = "adamw",
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over the parameters that require a gradient; frozen ones are left out.

    Off the processor one kernel takes the whole step (`fused`). NOT RUN ON A GPU.

    `adamw_bf16` keeps its states in bfloat16, as the parameters must be then. Call it after `parallel.shard_model`,
    which replaces the parameters. Raises ValueError if every parameter is frozen, the strategy is unknown, or a
    parameter is not bfloat16 with `adamw_bf16`.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no optimizer strategy is called {strategy!r} (there are: {', '.join(STRATEGIES)})")
    trained = {name: param for name, param in named_params if param.requires_grad}
    if not trained:
        raise ValueError("no parameter requires a gradient: everything is frozen, so there is nothing to train")
    for name, param in trained.items():
        if strategy == "adamw_bf16" and param.dtype != torch.bfloat16:
            raise ValueError(f"adamw_bf16 trains bfloat16 parameters, {name!r} is {param.dtype}: load the model so")
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    if strategy == "adamw" and all(param.device.type != "cpu" for param in trained.values()):
        # For sharded parameters torch would otherwise loop over them, a dozen small operations for each.
        settings["fused"] = True
    return STRATEGIES[strategy](trained.values(), **settings)


def clip_and_step(optimizer: torch.optim.Optimizer, lrs: Iterable[float], max_grad_norm: float) -> float:
    """Clip the gradient's norm, step, and clear the gradients; return the norm before, over all ranks.

    A norm that is not finite leaves parameters and the optimizer's states as they are.

    Args:
        lrs: the learning rate of each of the optimizer's groups.

    Raises:
        RuntimeError: no parameter has a gradient.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    if not params:
        raise RuntimeError("there is no gradient to step with; call forward_backward first")
    norm = total_norm([param.grad for param in params])
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    grad_norm = norm.item()
    if math.isfinite(grad_norm):
        torch.nn.utils.clip_grads_with_norm_(params, max_grad_norm, norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def learning_rate_scale(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    kind: Schedule = "constant",
    num_cycles: float = 0.5,
) -> float:
    """The factor on the base learning rate at optimizer step `step`, counted from 0.

    It rises linearly to 1 over `warmup_steps` (the first step already moves: 1 / warmup_steps, not 0), then stays
    (`constant`, which ignores `min_lr_ratio`) or falls to `min_lr_ratio` at `total_steps`, along half a cosine
    (arXiv 1608.03983) or a line, and stays there. With `num_cycles` the cosine goes through that many waves
    instead of half of one. Raises ValueError on an unknown kind.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"no learning-rate schedule is called {kind!r} (there are: {', '.join(SCHEDULES)})")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    remaining = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress)) if kind == "cosine" else 1 - progress
    return min_lr_ratio + (1 - min_lr_ratio) * remaining
