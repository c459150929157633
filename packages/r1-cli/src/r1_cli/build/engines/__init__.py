"""The engines of r1, a module each: what is found here is what `worker.rollout.name` may say.

A module has `IGNORES`, `missing`, `preferred` and `open_engine`, as `config.engines.EngineModule` describes them, and
imports what is heavy only when it opens its engine.
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
    """All that an engine may need to know."""

    config: "RunConfig"
    hardware: "Hardware"
    model: "ModelFiles"
    end_token_ids: frozenset[int]  # that end a response
    banned_token_ids: frozenset[int]  # that are never sampled
    max_sequences: int  # samples that decode at the same time; a whole group at least
    load_weights: Callable[[], Any]  # a Hugging Face model that the engine may take over
    read_only: bool = False  # all of it but the weights, which are a learner's
