"""Checksums of weights: an engine's against the learner's, byte by byte.

Log-probs cannot show that they are equal: in bfloat16 a hundred small steps change them by less than rounding does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from r1_rollout.lora import Adapter
from r1_rollout.names import Directory
from r1_rollout.weights import Weights, dtype_named, named_tensors

_BLOCK = 1 << 20  # elements that are summed at a time
_STEP, _MIX = 0x61C8864680B583EB, 0x3C79AC492BA7B653  # odd, of irregular bits

Pairs: TypeAlias = frozenset[tuple[int, int]]  # what a tensor's copies must come to, and what they come to


@dataclass(frozen=True, slots=True)
class Expected:
    rows: int  # of the tensor, which may be part of a fused one in the engine
    sums: Mapping[str, int]  # by the precision of the copy, such as `bfloat16`
    constant: bool = False  # its elements are all alike, so that a layout of the engine's own would not show


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of an engine's tensors differ from the learner's, by the learner's names."""

    differing: Mapping[str, Pairs]  # those that are not the same bytes
    unread: tuple[str, ...] = ()  # those that the engine has packed, sharded or keeps in a precision nobody asked about


def checksum(tensor: Tensor) -> int:
    """Return a sum of a tensor's bytes, weighted by position, modulo 2^64.

    Different tensors have equal sums with a chance of 1 in 2^32 or less, and never if they differ in one element.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    weights, total = _scattered(_BLOCK, flat.device), torch.zeros((), dtype=torch.int64, device=flat.device)
    blocks = bits.split(_BLOCK)
    for block, weight in zip(blocks, _scattered(len(blocks), flat.device), strict=True):
        total += weight * (weights[: len(block)] * block).sum()
    return int(total) % (1 << 64)


@lru_cache(maxsize=8)
def _scattered(count: int, device: torch.device) -> Tensor:
    """Return odd numbers of irregular bits, int64 [count]: with regular ones, elements that move could cancel out."""
    places = torch.arange(1, 1 + count, device=device) * _STEP
    places = (places ^ (places >> 31)) * _MIX
    return (places ^ (places >> 29)) | 1


def expected_checksums(weights: Weights, precisions: Iterable[str], *, factors: bool = False) -> dict[str, Expected]:
    """Return the sums of each tensor, as it is and cast to each of `precisions`; runs where the weights are.

    Args:
        factors: include an adapter's, which most engines keep in no comparable form.
    """
    if isinstance(weights, Adapter):
        return expected_checksums(weights.weights, precisions) if factors else {}
    kinds = [dtype_named(name) for name in precisions]
    found = {}
    for name, tensor in named_tensors(weights):
        dtypes = {tensor.dtype, *kinds} if tensor.is_floating_point() else {tensor.dtype}
        sums = {str(kind).removeprefix("torch."): checksum(tensor.to(kind)) for kind in dtypes}
        found[name] = Expected(tensor.shape[0] if tensor.ndim else 1, sums, _is_constant(tensor))
    return found


def _is_constant(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    return len(flat) > 1 and all(bool((part == flat[0]).all()) for part in (flat[:64], flat))


def compare(own: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> Comparison:
    """Compare an engine's tensors, which may be fused, with the learner's, byte by byte."""
    directory, differing, unread = Directory(own), {}, []
    for name, one in expected.items():
        place = directory.find(name, one.rows)
        if place is None or not place.target.numel():
            unread.append(name)
            continue
        view = place.target[place.first_row : place.first_row + one.rows] if place.target.ndim else place.target
        known = one.sums.get(str(view.dtype).removeprefix("torch."))
        if known is None:
            unread.append(name)
        elif known != (found := checksum(view)):
            differing[name] = frozenset({(known, found)})
    return Comparison(differing, tuple(unread))


def merged(comparisons: Sequence[Comparison]) -> Comparison:
    """Combine comparisons of several copies of a model: a tensor that differs in one differs."""
    unread = dict.fromkeys(name for one in comparisons for name in one.unread)
    differing: dict[str, Pairs] = {}
    for name in dict.fromkeys(name for one in comparisons for name in one.differing):
        pairs = frozenset().union(*(one.differing.get(name, frozenset()) for one in comparisons))
        if any(name not in one.differing and name not in one.unread for one in comparisons):
            pairs |= {(right, right) for right, _ in pairs}
        differing[name] = pairs
    return Comparison(differing, tuple(unread))


@dataclass(slots=True)
class ByteProof:
    """Finds stale tensors from sync to sync in engines that may keep some in a layout of their own.

    A tensor is stale if its copy stayed the same while the learner's changed, if it equals the learner's previous one,
    or if it was equal at the last sync and differs now. The last rule excludes tensors of equal elements, such as new
    biases: they look the same in any layout.
    """

    keeps_layout: bool  # whether the engine keeps the learner's layout, so that no tensor may differ
    apart: Mapping[str, Pairs] | None = None  # what may differ since the last sync, which was right; None before it
    unproven: frozenset[str] = frozenset()  # at the last sync, because they differed or could not be read

    def stale(self, found: Comparison) -> list[str]:
        if self.keeps_layout:
            return sorted(found.differing)
        if self.apart is None:
            return sorted(name for name, pairs in found.differing.items() if any(one == two for one, two in pairs))
        return sorted(
            name
            for name, pairs in found.differing.items()
            if name not in self.apart or _stayed(self.apart[name], pairs)
        )

    def take(self, found: Comparison, expected: Mapping[str, Expected]) -> list[str]:
        """Accept a sync; return the tensors that bytes cannot verify, if there are more than before."""
        unproven = [*found.unread, *found.differing]
        grown = not {*unproven} <= self.unproven
        self.apart = {**found.differing} | {
            name: frozenset((total, total) for total in one.sums.values())
            for name, one in expected.items()
            if one.constant and name not in unproven
        }
        self.unproven = frozenset(unproven)
        return unproven if grown else []


def _stayed(before: Pairs, now: Pairs) -> bool:
    return any(new != old and own in (kept, old) for old, kept in before for new, own in now)
