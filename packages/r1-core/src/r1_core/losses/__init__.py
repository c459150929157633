"""Policy losses by name, and how their tokens are averaged."""

from collections.abc import Callable

from r1_core.losses.aggregation import AGGREGATIONS, Aggregation, aggregate
from r1_core.losses.policy import PolicyLoss
from r1_core.losses.ppo import PPOClip
from r1_core.registry import Registry

# Each entry builds a loss from keyword settings.
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("policy loss", {"default": PPOClip})
register = POLICY_LOSSES.register
get = POLICY_LOSSES.get

__all__ = ["AGGREGATIONS", "POLICY_LOSSES", "Aggregation", "PPOClip", "PolicyLoss", "aggregate", "get", "register"]
