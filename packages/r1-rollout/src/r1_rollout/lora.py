"""Low-rank adapters (LoRA, arXiv 2106.09685): only the factors travel, the engine keeps the base they stand on."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a sync carries where only an adapter is trained: W = base + (alpha / rank) · B · A.

    Example: `Adapter(8, 16.0, ("q_proj", "v_proj"), peft_model_state_dict.items())`
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]  # ends of module names, as in PEFT, or `all-linear`
    weights: Iterable[tuple[str, Tensor]]  # PEFT's names; A is [rank, inputs], B is [outputs, rank]
