"""An adapter on a frozen base, as the learner knows it: what is trained, kept and handed over, and how to leave it out.

The adapter itself is in the model, put there by whoever built it: low-rank factors (LoRA, arXiv 2106.09685), say.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Which parameters of a model are an adapter's.

    Example: `Adaptation({"layers.0.q_proj.lora_A.default.weight": "base_model.model.layers.0.q_proj.lora_A.weight"},
    switched_off, {"adapter_config.json": "{…}"}, {"name": "Qwen/Qwen2.5-0.5B", "digest": "9f…"})`.
    """

    names: Mapping[str, str]  # of its parameters: what a checkpoint calls each, by state-dict name
    off: Callable[[], AbstractContextManager[None]]  # inside it the model computes as if there were no adapter
    files: Mapping[str, str]  # text files that a checkpoint holds beside the tensors, by name
    base: Mapping[str, str]  # what a checkpoint says of the frozen rest; its `digest` must be the same to load one

    def state(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's parameters under their state-dict names, in the order of `names`."""
        own = dict(model.named_parameters())
        for name in self.names:
            yield name, own[name]
