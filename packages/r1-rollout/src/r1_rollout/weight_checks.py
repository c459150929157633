"""Checks after a weight sync: the canary compares log-probs of fixed sequences, checksums compare bytes.

Log-probs cannot show that all bytes arrived: in bfloat16 a hundred small steps change them by less than rounding does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

import torch
from torch import Tensor

from r1_rollout.lora import Adapter
from r1_rollout.names import Directory
from r1_rollout.probes import Probes
from r1_rollout.types import Comparison, Expected, Pairs, Replaying
from r1_rollout.weights import Weights, dtype_named, named_tensors

# Widest gap that is accepted, by the coarser precision of the two sides. What rounding alone does to random models of 8
# to 24 layers was measured: 2e-7 to 8e-7 in float32, 0.01 to 0.03 in bfloat16, which keeps 8 significant bits of every
# logit, on each side in its own way. float16 keeps 11.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 0.0075, torch.bfloat16: 0.06}

# How many times what a unit in the last place of each layer's output does to log-probs two right ways may differ by. In
# half precision it was 0.1 to 1.5 times for the embedded engine, of random models of 6 to 24 layers over responses of
# `probes.OPENING` tokens, and up to 2.2 times for vLLM.
NOISE = 8.0

_SHARE = 0.1  # of the learner's difference between two pictures


@dataclass(frozen=True, slots=True)
class Canary:
    """Sequences to compare, and the largest accepted gap.

    Below the tolerance, small updates that never arrive hide in bfloat16; the gap on sampled tokens shows them earlier.
    `opening` is compared once, with a tolerance learned from the first weights, to find faults such as wrong rotations.
    """

    probes: Probes
    fresh: Probes  # others, of the same kinds, which no cache can know
    tolerance: float  # see `TOLERANCE`
    temperature: float = 1.0  # at which both sides report
    pictures: Probes | None = None  # one text and response with two pictures, which the engine must tell apart
    opening: "Canary | None" = None  # compared at the first sync, too

    def gap(self, engine: Replaying, expected: Sequence[Sequence[float]]) -> float:
        return widest_gap(probe_logprobs(engine, self.probes, self.temperature), expected)

    def tells_pictures_apart(self, engine: Replaying, expected: Sequence[Sequence[float]]) -> bool:
        """Whether two pictures change the engine's log-probs at least a tenth as much as the learner's, `expected`."""
        assert self.pictures is not None
        first, second = probe_logprobs(engine, self.pictures, self.temperature)
        return not widest_gap([first], [second]) < _SHARE * widest_gap([expected[0]], [expected[1]])

    def accepts(self, gap: float) -> bool:
        return gap <= self.tolerance


def probe_logprobs(engine: Replaying, probes: Probes, temperature: float) -> list[list[float]]:
    return engine.logprobs_of(probes.prompts, probes.responses, temperature)


def learn_tolerance(noise: float, precision: torch.dtype) -> float:
    """Return how far two correct computations of a model's log-probs may differ.

    Args:
        noise: the `widest_gap` if each layer's output changes by a unit in the last place of `precision`; 0 or NaN:
            unknown.
        precision: the coarser one of the two sides.
    """
    least = TOLERANCE[torch.float32]
    widest = TOLERANCE.get(precision, least)
    return max(least, min(widest, NOISE * noise)) if noise > 0 else widest


def widest_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the gap of the sequence where two sides differ most: NaN where any log-prob is not finite.

    It is the mean distance of the sequence's log-probs over their mean size on the right side, or over 1 nat if that is
    less: rounding grows with the logits. Raises ValueError if the two have different lengths.
    """
    if [*map(len, left)] != [*map(len, right)]:
        lengths = [*map(len, left)], [*map(len, right)]
        raise ValueError(f"the engine and the learner gave log-probs for {lengths[0]} and {lengths[1]} tokens")
    gaps = [
        fmean(abs(a - b) for a, b in zip(one, other, strict=True)) / max(1.0, fmean(map(abs, other)))
        for one, other in zip(left, right, strict=True)
    ]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.nan


_BLOCK = 1 << 20  # elements that are summed at a time
_STEP, _MIX = 0x61C8864680B583EB, 0x3C79AC492BA7B653  # odd, of irregular bits


def checksum(tensor: Tensor) -> int:
    """Return a sum of a tensor's bytes, weighted by position, modulo 2^64.

    Different tensors have equal sums with a chance of 1 in 2^32 or less, and never if they differ in one element.
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    weights, blocks = _scattered(_BLOCK, flat.device), bits.split(_BLOCK) if len(bits) > _BLOCK else [bits]
    sums = [(weights[: len(block)] * block).sum() for block in blocks]
    total = sums[0] if len(sums) == 1 else (torch.stack(sums) * _scattered(len(sums), flat.device)).sum()
    return int(total) % (1 << 64)


@lru_cache(maxsize=8)
def _scattered(count: int, device: torch.device) -> Tensor:
    """Return odd numbers of irregular bits, int64 [count]: with regular ones, elements that move could cancel out."""
    places = torch.arange(1, 1 + count, device=device) * _STEP
    places = (places ^ (places >> 31)) * _MIX
    return (places ^ (places >> 29)) | 1


def expected_checksums(
    weights: Weights, precisions: Iterable[str], *, keeps_layout: bool = False
) -> dict[str, Expected]:
    """Return the sums of each tensor, as it is and cast to each of `precisions`; runs where the weights are.

    Args:
        keeps_layout: the engine's, see `Checksummed`. Then an adapter's factors are included, and tensors of equal
            elements are not looked for, as no tensor may differ.
    """
    if isinstance(weights, Adapter):
        return expected_checksums(weights.weights, precisions, keeps_layout=True) if keeps_layout else {}
    kinds = [*map(dtype_named, precisions)]
    found = {}
    for name, tensor in named_tensors(weights):
        dtypes = {tensor.dtype, *kinds} if tensor.is_floating_point() else {tensor.dtype}
        sums = {str(kind).removeprefix("torch."): checksum(tensor.to(kind)) for kind in dtypes}
        constant = not keeps_layout and _is_constant(tensor)
        found[name] = Expected(tensor.shape[0] if tensor.ndim else 1, sums, constant)
    return found


def _is_constant(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    return len(flat) > 1 and bool((flat[:64] == flat[0]).all()) and bool((flat == flat[0]).all())


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
