"""How the samples of a step are cut: over ranks, into micro-batches, balanced by tokens."""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from r1_core.types import Sample, Totals

# What `balance` fills: the load, an index that is in no other bin (it breaks ties), and all indices.
Bin = tuple[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class MicroLimit:
    """How much one forward pass may hold: `samples` sequences, or, if `tokens` is set, that many tokens instead."""

    samples: int = 1
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of a micro-batch is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Batching:
    """How the learner cuts a step. No choice here changes the gradient, only speed and memory.

    `padding_free` packs a micro-batch into one row; otherwise its samples are padded to the longest.
    """

    padding_free: bool = True
    update: MicroLimit = MicroLimit(1)  # forward passes with a gradient
    experience: MicroLimit = MicroLimit(2)  # forward passes without


def count(samples: Sequence[Sample]) -> Totals:
    """Count the trained tokens, the sequences that have any, and the tokens of the longest."""
    lengths = [sample.response_length for sample in samples]
    return Totals(sum(lengths), sequences=sum(length > 0 for length in lengths), length=max(lengths, default=1))


def balance(lengths: Sequence[int], bins: int, equal_size: bool = False) -> list[list[int]]:
    """Spread indices over `bins` so that the sums of their lengths are close; deterministic, indices rise within a bin.

    By differencing (Karmarkar and Karp, 1982): begin with every length in a partial answer of its own; as long as
    there are two, join those of the widest spread, the fullest bins of one with the emptiest of the other. Every bin
    gets an index if there are enough. With `equal_size` the bins' counts differ by at most one: the answers to begin
    with then hold one length for each bin.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    width = bins if equal_size else 1
    # A partial answer is the list of its bins that are not empty, lightest first.
    answers: list[list[Bin]] = [
        [(lengths[i], i, [i]) for i in reversed(order[start : start + width])] for start in range(0, len(order), width)
    ]
    heap = [(*_urgency(answer, bins), i, answer) for i, answer in enumerate(answers)]
    heapq.heapify(heap)
    widest: tuple[int, int, int, list[Bin]] = heapq.heappop(heap) if heap else (0, 0, 0, [])
    while heap:
        *_, i, answer = widest
        joined = _join(answer, heapq.heappop(heap)[-1], bins)
        widest = heapq.heappushpop(heap, (*_urgency(joined, bins), i, joined))
    full = sorted(sorted(indices) for _, _, indices in widest[-1])
    return full + [[] for _ in range(bins - len(full))]


def _urgency(answer: list[Bin], bins: int) -> tuple[int, int]:
    """What to join first: the widest spread from the fullest to the emptiest bin, then the fullest bin."""
    fullest = answer[-1][0]
    emptiest = answer[0][0] if len(answer) == bins else 0
    return emptiest - fullest, -fullest


def _join(one: list[Bin], other: list[Bin], bins: int) -> list[Bin]:
    """Merge the smaller answer into the larger, its fullest bins first: into empty bins, then onto the emptiest."""
    small, large = (one, other) if len(one) < len(other) else (other, one)
    empty = bins - len(large)
    shared = max(len(small) - empty, 0)
    emptiest = large[:shared]
    del large[:shared]
    for alone in small[shared:]:
        insort(large, alone)
    for (load, index, indices), (more, _, others) in zip(reversed(small[:shared]), emptiest, strict=True):
        short, long = (indices, others) if len(indices) < len(others) else (others, indices)
        long.extend(short)
        insort(large, (load + more, index, long))
    return large


def split(lengths: Sequence[int], limit: MicroLimit) -> list[list[int]]:
    """Cut indices into micro-batches that keep to `limit`; deterministic, none empty.

    With a token limit the bins are balanced and as few as balancing allows; only a single sample that is longer
    than the limit by itself goes over it. Without one they are consecutive runs of `limit.samples`.
    """
    if limit.tokens is None:
        return [list(range(i, min(i + limit.samples, len(lengths)))) for i in range(0, len(lengths), limit.samples)]
    # No two samples of more than half the limit fit together.
    bins = max(-(-sum(lengths) // limit.tokens), sum(2 * length > limit.tokens for length in lengths))
    while bins < len(lengths):
        parts = balance(lengths, bins)
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= limit.tokens for part in parts):
            return parts
        bins += 1
    return [[i] for i in range(len(lengths))]


def schedule(samples: Sequence[Sample], limit: MicroLimit, rank: int, world: int) -> list[list[int]]:
    """The micro-batches of one rank, as indices into `samples`; every rank computes the same cut without talking.

    Collectives must match, so all ranks get the same number of micro-batches: some may be empty at the end. Where the
    limit counts samples, the ranks get equally many of them (at most one more), so that few are.
    """
    lengths = [sample.token_ids.shape[0] for sample in samples]
    cuts = []
    shares = balance(lengths, world, limit.tokens is None) if world > 1 else [list(range(len(lengths)))]
    for share in shares:
        parts = split([lengths[i] for i in share], limit)
        cuts.append([[share[i] for i in part] for part in parts])
    rounds = max(map(len, cuts))
    return cuts[rank] + [[] for _ in range(rounds - len(cuts[rank]))]


def fillers(present: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
    """Samples that train nothing, to add to a micro-batch so that it runs every part of the model that others run.

    A rank whose micro-batch has no pictures would skip the vision tower, and with it the collectives that the other
    ranks wait in. So for each kind of model input that some sample of the step has and `present` lacks, add the
    shortest sample that has it; an empty micro-batch gets one sample at least.
    """
    added: list[Sample] = []
    for name in sorted({name for sample in samples for name in sample.model_inputs}):
        if not any(name in sample.model_inputs for sample in (*present, *added)):
            added.append(min((s for s in samples if name in s.model_inputs), key=lambda s: s.token_ids.shape[0]))
    if not present and not added:
        added.append(min(samples, key=lambda s: s.token_ids.shape[0]))
    return [replace(sample, loss_mask=torch.zeros_like(sample.loss_mask)) for sample in added]
