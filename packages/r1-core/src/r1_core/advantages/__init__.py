"""Advantage estimators by name."""

from collections.abc import Callable

from r1_core import registry
from r1_core.advantages.dr_grpo import DrGRPO
from r1_core.advantages.gae import GAE
from r1_core.advantages.gdpo import GDPO
from r1_core.advantages.gigpo import GiGPO
from r1_core.advantages.gpg import GPG
from r1_core.advantages.grpo import GRPO
from r1_core.advantages.grpo_passk import GRPOPassK
from r1_core.advantages.inputs import AdvantageInputs, Estimator, assign
from r1_core.advantages.lite_ppo import LitePPO
from r1_core.advantages.maxrl import MaxRL
from r1_core.advantages.opo import OPO
from r1_core.advantages.optimal_token import OptimalTokenBaseline
from r1_core.advantages.reinforce import Reinforce
from r1_core.advantages.reinforce_plus_plus import ReinforcePlusPlus
from r1_core.advantages.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from r1_core.advantages.remax import ReMax
from r1_core.advantages.rloo import RLOO
from r1_core.registry import Registry

# Each entry builds an estimator from keyword settings; what there is follows from the files of this folder.
ESTIMATORS: Registry[Callable[..., Estimator]] = Registry(
    "advantage estimator", {name: entry.load() for name, entry in registry.estimators().items()}
)
register = ESTIMATORS.register
get = ESTIMATORS.get

__all__ = [
    "ESTIMATORS",
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "AdvantageInputs",
    "DrGRPO",
    "Estimator",
    "GRPOPassK",
    "GiGPO",
    "LitePPO",
    "MaxRL",
    "OptimalTokenBaseline",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "assign",
    "get",
    "register",
]
