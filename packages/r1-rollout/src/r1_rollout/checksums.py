"""Checksums of weights: an engine's against those of the learner, so that equal versions are equal bytes.

Log-probs cannot prove it. In bfloat16 an engine that stays at its first weights for a hundred small steps differs by
less than rounding does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from r1_rollout.lora import Adapter
from r1_rollout.names import Directory
from r1_rollout.weights import Weights, named_tensors

_BLOCK = 1 << 22  # elements that are summed at a time
_STEP = 0x61C8864680B583EB  # odd, so that no two of 2^64 places weigh the same


@dataclass(frozen=True, slots=True)
class Expected:
    """What an engine's copy of one tensor must come to."""

    rows: int  # of the tensor, which may be part of a fused one in the engine
    sums: Mapping[str, int]  # by the precision of the copy, such as `bfloat16`


def checksum(tensor: Tensor) -> int:
    """Return a sum over a tensor's bytes in which every place has a weight of its own, modulo 2^64.

    It differs for tensors that differ in one element, and but for chance, 1 in 2^64, for others.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits, total = flat.view(kind), 0
    for first in range(0, len(bits), _BLOCK):
        block = bits[first : first + _BLOCK].to(torch.int64)
        places = torch.arange(first + 1, first + 1 + len(block), device=block.device)
        total += int(((places * _STEP) * block).sum())
    return total % (1 << 64)


def expected_checksums(weights: Weights, precisions: Iterable[str]) -> dict[str, Expected]:
    """Return what each tensor comes to, as it is and cast to each of `precisions`; to be run where the weights are.

    Of an adapter nothing: engines merge it with what they have.
    """
    if isinstance(weights, Adapter):
        return {}
    kinds = [getattr(torch, name) for name in precisions]
    found = {}
    for name, tensor in named_tensors(weights):
        wanted = {tensor.dtype, *kinds} if tensor.is_floating_point() else {tensor.dtype}
        sums = {str(kind).removeprefix("torch."): checksum(tensor.to(kind)) for kind in wanted}
        found[name] = Expected(tensor.shape[0] if tensor.ndim else 1, sums)
    return found


def differing(own: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> list[str]:
    """Return which tensors an engine's own do not equal, byte by byte.

    Args:
        own: the engine's tensors, by its own names, which may be fused. Passed over are those that it has packed or
            emptied, and those in a precision that nobody has asked about.
        expected: by the learner's names.
    """
    directory, wrong = Directory(own), []
    for name, one in expected.items():
        place = directory.find(name, one.rows)
        if place is None or not place.target.numel():
            continue
        view = place.target[place.first_row : place.first_row + one.rows] if place.target.ndim else place.target
        known = one.sums.get(str(view.dtype).removeprefix("torch."))
        if known is not None and known != checksum(view):
            wrong.append(name)
    return wrong
