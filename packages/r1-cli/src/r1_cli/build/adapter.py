"""The LoRA adapter of a run: on the policy, in the learner, and what engines load instead of full weights."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from r1_cli.config import RunConfig
from r1_cli.models.adapters import CONFIG_FILE, AdapterError, Adapters, Form, factor_names
from r1_cli.models.frozen_base import Base
from r1_cli.models.load import ModelError
from r1_core.learner import Learner
from r1_core.learner.checkpoint import Adaptation
from r1_rollout.lora import Adapter
from r1_rollout.weights import LocalWeights


def open_adapters(config: RunConfig) -> Adapters | None:
    """Return the adapters of `worker.actor.model.lora`, or None. Raises ModelError if one cannot be read."""
    lora = config.worker.actor.model.lora
    try:
        return Adapters(Form.of(lora)) if lora.used else None
    except AdapterError as error:
        raise ModelError(str(error)) from error


def build_adaptation(
    adapters: Adapters, policy: nn.Module, path: str, dtype: torch.dtype, quantization: str | None = None
) -> Adaptation:
    """Return the learner's description of the adapter on `policy`, whose base is the model at `path` in `dtype`."""
    base = Base.of(path, dtype, quantization)
    return Adaptation(
        names=factor_names(policy),
        off=adapters.off,
        files={CONFIG_FILE: adapters.describe(base.name)},
        base=base.as_dict(),
    )


class AdaptedLearner(Learner):
    """A learner of an adapter. Engines get the adapter and read the base from its files."""

    def __init__(self, adapters: Adapters, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._adapters = adapters

    @property
    def form(self) -> Adapter:
        return self._adapters.form_for_engines

    def source(self, version: int) -> LocalWeights:
        return LocalWeights(lambda: replace(self.form, weights=self.weights()), version, taken=self.offload)
