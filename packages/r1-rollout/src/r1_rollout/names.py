"""Names of weights, which differ between trainers, wrappers, adapters, checkpoints and engines."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

# What a wrapper puts into the names of what it wraps: torch.compile, FSDP, checkpointing, a PEFT adapter.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)(?=\.)")
# Containers in front of a name. They differ between layouts: `visual.x` became `model.visual.x`, and `model.layers.0`
# was `language_model.model.layers.0` before it became `model.language_model.layers.0`.
_CONTAINERS = re.compile(r"^((base_model|module|model|language_model)\.)+")
_ADAPTER = re.compile(r"^(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight$")
# Projections that some engines stack along the rows. All parts but the first are equally large.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def unwrapped(name: str) -> str:
    """Strip wrappers' additions from a name.

    Example: `unwrapped("_orig_mod.layers.0.mlp.up_proj.base_layer.weight") == "layers.0.mlp.up_proj.weight"`
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def core(name: str) -> str:
    """Strip wrappers and leading containers from a tensor's name: the same in all layouts of a model."""
    return _CONTAINERS.sub("", unwrapped(name))


def adapter_part(name: str) -> tuple[str, Literal["A", "B"]] | None:
    """Return (module, side) of one factor of a LoRA adapter as PEFT names it, or None for any other tensor."""
    match = _ADAPTER.match(unwrapped(name))
    return (match["module"], "A" if match["side"] == "A" else "B") if match else None


@dataclass(frozen=True, slots=True)
class Place:
    """The engine's tensor for a weight, and which part of it if that is fused."""

    name: str  # the engine's
    target: Tensor
    part: str | None = None  # one of FUSED's, e.g. `k_proj`
    first_row: int = 0

    def rows(self, count: int) -> Tensor:
        return self.target if self.part is None else self.target[self.first_row : self.first_row + count]


class Directory:
    """Finds an engine's tensor by any of the names that a trainer may have for it."""

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        self._own = {unwrapped(name): (name, tensor) for name, tensor in own.items()}
        cores = Counter(core(name) for name in own)
        # Where two tensors share a core, only their full names tell them apart.
        self._cores = {core(name): (name, tensor) for name, tensor in own.items() if cores[core(name)] == 1}

    def find(self, name: str, rows: int) -> Place | None:
        if found := self._lookup(name):
            return Place(*found)
        for fused, parts in FUSED.items():
            for index, part in enumerate(parts):
                whole = re.sub(rf"(^|\.){part}(?=\.)", rf"\g<1>{fused}", name)
                if whole != name and (found := self._lookup(whole)):
                    first_row = found[1].shape[0] - (len(parts) - index) * rows if index else 0
                    return Place(*found, part, first_row)
        return None

    def _lookup(self, name: str) -> tuple[str, Tensor] | None:
        return self._own.get(unwrapped(name)) or self._cores.get(core(name))
