"""Verifiers that score a model's responses, without torch.

Each built-in verifier is a module with `score(response, ground_truth) -> Score`, such as `r1_rewards.math`. `load`
turns a verifier's name or a user's `file.py:function` into a batch verifier that runs in killable worker processes.
"""

import importlib
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING

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
]  # without the modules below: `from r1_rewards import *` would hide Python's own `format`, and `math`

if TYPE_CHECKING:  # the modules' names are written by tests/write_tables.py
    from r1_rewards.reading import extract as extract
    from r1_rewards.reference import reference_probability as reference_probability
    from r1_rewards.verifiers import answer as answer
    from r1_rewards.verifiers import box as box
    from r1_rewards.verifiers import choice as choice
    from r1_rewards.verifiers import code as code
    from r1_rewards.verifiers import combine as combine
    from r1_rewards.verifiers import dapo as dapo
    from r1_rewards.verifiers import format as format
    from r1_rewards.verifiers import geo3k as geo3k
    from r1_rewards.verifiers import gsm8k as gsm8k
    from r1_rewards.verifiers import gsm8k_verl as gsm8k_verl
    from r1_rewards.verifiers import ifeval as ifeval
    from r1_rewards.verifiers import language as language
    from r1_rewards.verifiers import length as length
    from r1_rewards.verifiers import lmm_r1 as lmm_r1
    from r1_rewards.verifiers import math as math
    from r1_rewards.verifiers import math_dapo as math_dapo
    from r1_rewards.verifiers import math_easyr1 as math_easyr1
    from r1_rewards.verifiers import math_verl as math_verl
    from r1_rewards.verifiers import numeric as numeric
    from r1_rewards.verifiers import point as point
    from r1_rewards.verifiers import prime_math as prime_math
    from r1_rewards.verifiers import r1v as r1v
    from r1_rewards.verifiers import r1v_easyr1 as r1v_easyr1
    from r1_rewards.verifiers import reasoning_gym as reasoning_gym
    from r1_rewards.verifiers import repetition as repetition
    from r1_rewards.verifiers import search_r1 as search_r1
    from r1_rewards.verifiers import text as text

    __version__: str


# Modules that are asked for by these names, whichever folder they stand in.
_MODULES = {
    **{name: f"verifiers.{name}" for name in BUILTINS},
    "extract": "reading.extract",
    "reference_probability": "reference.reference_probability",
}


if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> ModuleType | str:
        if name == "__version__":
            return importlib.metadata.version("r1-rewards")
        if name in _MODULES:
            return importlib.import_module(f"r1_rewards.{_MODULES[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])
