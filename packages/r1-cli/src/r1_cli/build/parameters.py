"""Which parameters of a model are trained, and at which learning rate."""

import logging

import torch
from torch import nn

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.model import ModelConfig
from r1_cli.config.root import Owner
from r1_cli.models.load import freeze_vision
from r1_core.learner.optim import RateGroup, build_optimizer, matching

log = logging.getLogger("r1")


def freeze(settings: ModelConfig, model: nn.Module, owner: Owner = "actor") -> None:
    """Freeze what the owner's settings name. Raises ModelError or ConfigError if there is nothing to freeze."""
    if settings.freeze_vision_tower:
        freeze_vision(model, f"worker.{owner}.model.freeze_vision_tower")
    params = dict(model.named_parameters())
    for pattern in settings.freeze:
        try:
            names = matching(pattern, params)
        except ValueError as error:
            raise ConfigError([Problem(f"worker.{owner}.model.freeze", str(error))]) from error
        for name in names:
            params[name].requires_grad_(False)


def build_policy_optimizer(config: RunConfig, policy: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with the rates of `optim.groups`. Raises ConfigError if a group has no parameter."""
    optim = config.worker.actor.optim
    groups = [RateGroup(one.name or one.pattern, one.pattern, one.lr, one.weight_decay) for one in optim.groups]
    try:
        return build_optimizer(
            policy.named_parameters(),
            lr=optim.lr,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            strategy=optim.strategy,
            groups=groups,
        )
    except ValueError as error:
        key = "worker.actor.optim.groups" if groups else "worker.actor.model.freeze"
        raise ConfigError([Problem(key, str(error))]) from error


def log_trained_parameters(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    counts = [sum(param.numel() for param in group["params"]) for group in groups]
    whole = sum(param.numel() for param in policy.parameters())
    if sum(counts) == whole and len(groups) == 1:
        return
    log.info("%s of %s weights are trained", f"{sum(counts):,}", f"{whole:,}")
    if len(groups) > 1:
        for group, count in zip(groups, counts, strict=True):
            log.info("  %s of them (%s) at a rate of %g", f"{count:,}", group["name"], group["lr"])
