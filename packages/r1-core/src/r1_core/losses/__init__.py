"""Policy losses by name, the critic's loss, aggregation over tokens, and importance weights for stale samples."""

from collections.abc import Callable

from r1_core import registry
from r1_core.losses.cispo import CISPO
from r1_core.losses.correction import Correction, Rejection
from r1_core.losses.covariance import ClipCov, KLCov
from r1_core.losses.dppo import DPPOKL, DPPOTV
from r1_core.losses.gmpo import GMPO
from r1_core.losses.gradient import PolicyGradient
from r1_core.losses.gspo import GSPO, LUSPO, GSPOToken
from r1_core.losses.nll import NLL
from r1_core.losses.policy import AGGREGATIONS, Aggregation, PolicyLoss, aggregate
from r1_core.losses.ppo import PPOClip
from r1_core.losses.sapo import SAPO
from r1_core.losses.value import ValueLoss, WeightedValue
from r1_core.losses.vespo import VESPO
from r1_core.registry import Registry

# Each entry builds a loss from keyword settings; what there is follows from the files of this folder.
POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry(
    "policy loss", {name: entry.load() for name, entry in registry.losses().items()}
)
register = POLICY_LOSSES.register
get = POLICY_LOSSES.get

__all__ = [
    "AGGREGATIONS",
    "CISPO",
    "DPPOKL",
    "DPPOTV",
    "GMPO",
    "GSPO",
    "LUSPO",
    "NLL",
    "POLICY_LOSSES",
    "SAPO",
    "VESPO",
    "Aggregation",
    "ClipCov",
    "Correction",
    "GSPOToken",
    "KLCov",
    "PPOClip",
    "PolicyGradient",
    "PolicyLoss",
    "Rejection",
    "ValueLoss",
    "WeightedValue",
    "aggregate",
    "get",
    "register",
]
