"""DAPO's soft overlong punishment: answers near the length limit lose reward gradually.

With free = max_length − buffer: 0 up to `free` tokens, (free − length) / buffer beyond, −1 from `max_length` on.

arXiv 2503.14476 (DAPO). Multiplied by `factor` and added to an answer's score.
"""

import torch
from torch import Tensor

from r1_core.types import check_tensors


def overlong_punishment(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return the punishment, from −factor to 0, for answer lengths [N] in tokens: float64 [N].

    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it must be above 0 and at most max_length, {max_length}")
    check_tensors("overlong_punishment", "[N]", lengths=lengths)
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * torch.clamp(excess, 0.0, 1.0)
