"""Advantages, losses and the learner for reinforcement learning of language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r1_core.advantages import AdvantageInputs as AdvantageInputs
    from r1_core.learner import Learner as Learner
    from r1_core.learner.batching import Batching as Batching
    from r1_core.learner.batching import MicroLimit as MicroLimit
    from r1_core.learner.logprobs import token_logprobs as token_logprobs
    from r1_core.learner.optim import build_optimizer as build_optimizer
    from r1_core.learner.optim import learning_rate_scale as learning_rate_scale
    from r1_core.learner.parallel import Parallel as Parallel
    from r1_core.learner.parallel import Shard as Shard
    from r1_core.learner.parallel import find_blocks as find_blocks
    from r1_core.learner.parallel import shard_model as shard_model
    from r1_core.objective import Objective as Objective
    from r1_core.types import LossInputs as LossInputs
    from r1_core.types import Sample as Sample

    __version__: str

# What is imported from the package itself, and the module that has it, loaded when first asked for.
PUBLIC = {
    "AdvantageInputs": "advantages",
    "Batching": "learner.batching",
    "Learner": "learner",
    "LossInputs": "types",
    "MicroLimit": "learner.batching",
    "Objective": "objective",
    "Parallel": "learner.parallel",
    "Sample": "types",
    "Shard": "learner.parallel",
    "build_optimizer": "learner.optim",
    "find_blocks": "learner.parallel",
    "learning_rate_scale": "learner.optim",
    "shard_model": "learner.parallel",
    "token_logprobs": "learner.logprobs",
}
__all__ = [*PUBLIC]


if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module("importlib.metadata").version("r1-core")
        if name in PUBLIC:
            return getattr(import_module(f"r1_core.{PUBLIC[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC, "__version__"])
