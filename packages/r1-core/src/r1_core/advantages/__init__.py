"""Advantage estimators by name: how much better than expected was each token."""

from collections.abc import Callable

from r1_core.advantages.assign import assign
from r1_core.advantages.grpo import GRPO
from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.registry import Registry

# Each entry builds an estimator from keyword settings.
ESTIMATORS: Registry[Callable[..., Estimator]] = Registry("advantage estimator", {"grpo": GRPO})
register = ESTIMATORS.register
get = ESTIMATORS.get

__all__ = ["ESTIMATORS", "GRPO", "AdvantageInputs", "Estimator", "assign", "get", "register"]
