"""The engines, one module each. The module's name is the value of `worker.rollout.name`.

A module has `IGNORES`, `missing`, `preferred` and `open_engine`, see `config.engines.EngineModule`, and imports heavy
packages only in `open_engine`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r1_cli.config import RunConfig
    from r1_cli.hardware import Hardware
    from r1_cli.models.files import ModelFiles


@dataclass(frozen=True, slots=True)
class EngineSetup:
    config: "RunConfig"
    hardware: "Hardware"
    model: "ModelFiles"
    end_token_ids: frozenset[int]  # that end a response
    banned_token_ids: frozenset[int]  # that are never sampled
    max_sequences: int  # samples that decode at the same time; a whole group at least
    load_weights: Callable[[], Any]  # a Hugging Face model that the engine may take over
    read_only: bool = False  # all of it but the weights, which are a learner's
