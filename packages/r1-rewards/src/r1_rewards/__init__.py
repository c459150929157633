"""Verifiers that score a model's responses, without torch.

Each built-in verifier is a module with `score(response, ground_truth) -> Score`, such as `r1_rewards.math`. `load`
turns a verifier's name or a user's `file.py:function` into a batch verifier that runs in killable worker processes.
"""

import importlib
import importlib.metadata
from types import ModuleType

from r1_rewards.load import load
from r1_rewards.types import (
    Cause,
    Failure,
    FailurePolicy,
    OpenVerifier,
    RewardFailure,
    RewardInput,
    RewardSpecError,
    Score,
    Verifier,
)
from r1_rewards.verifiers import BUILTINS
from r1_rewards.workers.pool import PooledVerifier

__all__ = [
    "Cause",
    "Failure",
    "FailurePolicy",
    "OpenVerifier",
    "PooledVerifier",
    "RewardFailure",
    "RewardInput",
    "RewardSpecError",
    "Score",
    "Verifier",
    "load",
]


# Modules that are asked for by these names, whichever folder they stand in.
_MODULES = {
    **{name: f"verifiers.{name}" for name in BUILTINS},
    "extract": "reading.extract",
    "reference_probability": "reference.reference_probability",
}


def __getattr__(name: str) -> ModuleType | str:
    if name == "__version__":
        return importlib.metadata.version("r1-rewards")
    if name in _MODULES:
        return importlib.import_module(f"r1_rewards.{_MODULES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])
