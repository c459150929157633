"""Optimizers by name, the optimizer step, learning-rate schedules, and parameter names by pattern."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, get_args

import torch
from torch import nn

from r1_core.learner.adamw_bf16 import AdamWBF16
from r1_core.learner.parallel import total_norm

Schedule = Literal["constant", "cosine", "linear"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
REST = "rest"  # the name of the parameters in no other group
STRATEGIES = {"adamw": torch.optim.AdamW, "adamw_bf16": AdamWBF16}


@dataclass(frozen=True, slots=True)
class RateGroup:
    r"""Parameters with their own learning rate.

    Example: `RateGroup("vision", r".*visual\..*", lr=1e-7)`.
    """

    name: str  # in names of metrics
    pattern: str  # a regular expression that matches whole parameter names
    lr: float
    weight_decay: float | None = None  # None: that of the others


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    strategy: str = "adamw",
    groups: Sequence[RateGroup] = (),
) -> torch.optim.Optimizer:
    """Build AdamW (arXiv 1711.05101) over the parameters that require a gradient. Call it after `parallel.shard_model`.

    The step is one fused kernel, three times as fast on CPUs; NOT RUN ON A GPU. `adamw_bf16` keeps its states in
    bfloat16. A parameter belongs to the first of `groups` that matches it, else to the group `rest`, which comes first.
    Raises ValueError if every parameter is frozen, the strategy is unknown, a parameter is not bfloat16 with
    `adamw_bf16`, or a group has no parameter.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no optimizer strategy is called {strategy!r} (there are: {', '.join(STRATEGIES)})")
    trained = {name: param for name, param in named_params if param.requires_grad}
    if not trained:
        raise ValueError("no parameter requires a gradient: everything is frozen, so there is nothing to train")
    for name, param in trained.items():
        if strategy == "adamw_bf16" and param.dtype != torch.bfloat16:
            raise ValueError(
                f"adamw_bf16 trains bfloat16 parameters, {name!r} is {param.dtype}: load the model in bfloat16"
            )
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
    if strategy == "adamw":
        # On CPUs and for sharded parameters, torch would loop over parameters with a dozen small operations each.
        settings["fused"] = True
    return STRATEGIES[strategy](_in_groups(trained, groups) if groups else trained.values(), **settings)


def _in_groups(trained: Mapping[str, nn.Parameter], groups: Sequence[RateGroup]) -> list[dict[str, Any]]:
    left, made = dict(trained), list[dict[str, Any]]()
    if len({group.name for group in groups} | {REST}) <= len(groups):
        raise ValueError(
            f"two parameter groups share a name, or one is called {REST!r}, the name of all other parameters"
        )
    for group in groups:
        names = matching(group.pattern, trained)
        mine = [left.pop(name) for name in names if name in left]
        if not mine:
            raise ValueError(f"earlier groups have all {len(names)} parameters that {group.pattern!r} matches")
        own = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
        made.append({"params": mine, "lr": group.lr, "name": group.name, **own})
    return ([{"params": [*left.values()], "name": REST}] if left else []) + made


def group_norms(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return `grad_norm/NAME` of each named parameter group that has gradients, over all ranks."""
    named = {group["name"]: group["params"] for group in optimizer.param_groups if "name" in group}
    gradients = {name: [p.grad for p in params if p.grad is not None] for name, params in named.items()}
    return {f"grad_norm/{name}": total_norm(own).item() for name, own in gradients.items() if own}


def clip_and_step(optimizer: torch.optim.Optimizer, lrs: Iterable[float], max_grad_norm: float) -> float:
    """Clip the gradient norm, step, and clear the gradients; return the norm before clipping, over all ranks.

    If the norm is not finite, nothing else changes. `lrs` has one learning rate per parameter group. Raises
    RuntimeError if no parameter has a gradient.
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
    """Return the factor on the base learning rate at optimizer step `step`, counted from 0.

    It rises linearly to 1 over `warmup_steps`, beginning at 1 / warmup_steps. Then it stays (`constant`) or falls to
    `min_lr_ratio` at `total_steps`, along half a cosine (arXiv 1608.03983) or a line. `num_cycles` is the number of
    cosine waves. Raises ValueError on an unknown kind.
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


SHOWN = 5


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a regular expression matches from beginning to end.

    Raises:
        ValueError: the expression is invalid or matches no name; shows similar names.
    """
    names = list(names)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    if found := [name for name in names if compiled.fullmatch(name)]:
        return found
    near = ", ".join(nearest(pattern, names)) or "there are none"
    raise ValueError(f"{pattern!r} matches none of {len(names)} names from beginning to end; similar names: {near}")


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    wanted = re.sub(r"[^\w.]", "", pattern.replace("\\", "").replace(".*", "")).strip(".").lower()
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "0", name), name)
    scores = {name: _likeness(wanted, name.lower()) for name in kinds.values()}
    return sorted(scores, key=lambda name: -scores[name])[:SHOWN]


def _likeness(wanted: str, name: str) -> float:
    parts = [*name.split("."), name]
    return max(SequenceMatcher(None, wanted, part, autojunk=False).ratio() for part in parts)
