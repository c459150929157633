"""Distribute the samples of a step over ranks and micro-batches, balanced by tokens."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import torch

from r1_core.learner.pack import SharedPrompts
from r1_core.types import PER_TOKEN, Sample, Totals

T = TypeVar("T")

# A bin of `balance`: its load, an index that no other bin has (breaks ties), and all indices.
Bin = tuple[int, int, list[int]]

Layout = Literal["packed", "padded", "single"]  # of a micro-batch's samples


@dataclass(frozen=True, slots=True)
class MicroLimit:
    """The size of a micro-batch: `samples` sequences, or, if set, `tokens` instead, padding included."""

    samples: int = 1
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} of a micro-batch is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Batching:
    """How the learner splits a step into micro-batches. Changes speed and memory, never the gradient.

    `padding_free` packs a micro-batch into one row, in which `share_prompts` computes shared prompts once.
    """

    padding_free: bool = True
    update: MicroLimit = MicroLimit(1)  # forward passes with a gradient
    experience: MicroLimit = MicroLimit(2)  # forward passes without
    share_prompts: bool = False  # needs a model that reads a `Pack`
    single: bool = False  # one sample per micro-batch, whatever the limits
    splits: bool = True  # halve a micro-batch whose memory runs out

    def cap(self, limit: MicroLimit) -> MicroLimit:
        return MicroLimit(1) if self.single else limit


def count(samples: Sequence[Sample]) -> Totals:
    lengths = [sample.response_length for sample in samples]
    return Totals(sum(lengths), sequences=len(lengths) - lengths.count(0), length=max(lengths, default=1))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _total(lengths: Sequence[int], indices: Sequence[int]) -> int:
    return sum(lengths[i] for i in indices)


def _pick(items: Sequence[T], parts: Iterable[Sequence[int]]) -> list[list[T]]:
    """Replace indices in parts by the items."""
    return [[items[i] for i in part] for part in parts]


def balance(lengths: Sequence[int], bins: int, equal_size: bool = False) -> list[list[int]]:
    """Distribute indices over `bins` with similar sums of lengths; deterministic, sorted within a bin.

    Uses the largest differencing method (Karmarkar and Karp, 1982): join the two partial solutions with the widest
    spread, the fullest bins of one with the emptiest of the other, until one is left. With `equal_size` the bins'
    counts differ by at most one.
    """
    order = _longest_first(lengths)
    width = bins if equal_size else 1
    heap: list[tuple[int, int, int, list[Bin]]] = []
    for start in range(0, len(order), width):
        # A partial solution is the list of its non-empty bins, lightest first.
        solution = [(lengths[i], i, [i]) for i in reversed(order[start : start + width])]
        heap.append((*_urgency(solution, bins), len(heap), solution))
    heapq.heapify(heap)
    widest: tuple[int, int, int, list[Bin]] = heapq.heappop(heap) if heap else (0, 0, 0, [])
    while heap:
        *_, i, solution = widest
        joined = _join(solution, heapq.heappop(heap)[-1], bins)
        widest = heapq.heappushpop(heap, (*_urgency(joined, bins), i, joined))
    full = sorted(sorted(indices) for _, _, indices in widest[-1])
    return full + [[] for _ in range(bins - len(full))]


def _urgency(solution: list[Bin], bins: int) -> tuple[int, int]:
    fullest = solution[-1][0]
    emptiest = solution[0][0] if len(solution) == bins else 0
    return emptiest - fullest, -fullest


def _join(one: list[Bin], other: list[Bin], bins: int) -> list[Bin]:
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


def split(lengths: Sequence[int], limit: MicroLimit, ranks: int = 1, *, padded: bool = False) -> list[list[int]]:
    """Split indices into micro-batches within `limit`; deterministic, the heaviest (padded: longest) first.

    The k-th belongs to rank k % `ranks`. Only the last round over the ranks may have empty ones. A token limit fills
    all rounds but the last and spreads the rest evenly; a sample limit makes all even. Padded, samples of similar
    length go together and a token limit counts padding. Only a single longer sample exceeds a token limit.
    """
    if padded:
        return _alike(lengths, limit, ranks)
    if limit.tokens is None:
        rounds = -(-len(lengths) // (limit.samples * ranks))
        parts = balance(lengths, rounds * ranks, equal_size=True)
        return sorted(parts, key=partial(_total, lengths), reverse=True)
    heaviness = partial(_total, lengths)
    parts = sorted(fill(lengths, limit.tokens), key=heaviness, reverse=True)
    parts += [[] for _ in range(-len(parts) % ranks)]
    last = list(chain(*parts[-ranks:]))
    even = _pick(last, balance([lengths[i] for i in last], ranks))
    if all(len(part) <= 1 or heaviness(part) <= limit.tokens for part in even):
        parts[-ranks:] = sorted(even, key=heaviness, reverse=True)
    return [sorted(part) for part in parts]


def split_groups(work: SharedPrompts, limit: MicroLimit, ranks: int = 1) -> list[list[int]]:
    """`split` for packed samples that share prompts.

    The unit is a prompt with all its answers, or as many as `limit` allows: a split group computes its prompt twice. In
    the last round, groups are split further if that makes the slowest rank faster.
    """
    size: Callable[[list[int]], int] = len if limit.tokens is None else work.tokens
    room = limit.samples if limit.tokens is None else limit.tokens
    units: list[list[int]] = []
    for group in work.groups(range(len(work.own))):
        if limit.tokens is None:
            units += [group[start : start + room] for start in range(0, len(group), room)]
        else:
            left = max(room - work.lengths[work.prompt[group[0]]], 1)
            units += _pick(group, fill([work.own[i] for i in group], left))
    parts = [list(chain(*part)) for part in _pick(units, fill([size(unit) for unit in units], room))]
    parts.sort(key=work.tokens, reverse=True)
    parts += [[] for _ in range(-len(parts) % ranks)]
    if ranks > 1:
        spread = _spread_groups(work, list(chain(*parts[-ranks:])), ranks)
        fitting = [even for even in spread if all(len(part) <= 1 or size(part) <= room for part in even)]
        parts[-ranks:] = min([parts[-ranks:], *fitting], key=partial(_fullest, work))
    return [sorted(part) for part in parts]


def _fullest(work: SharedPrompts, parts: Sequence[Sequence[int]]) -> int:
    return max(work.tokens(part) for part in parts)


def _spread_groups(work: SharedPrompts, indices: Sequence[int], ranks: int) -> Iterator[list[list[int]]]:
    """Yield ways to spread samples evenly over ranks, the fullest first: whole groups, halves, quarters, …"""
    groups, pieces = work.groups(sorted(indices)), 1
    while pieces < 2 * max(map(len, groups)):
        units: list[list[int]] = []
        for group in groups:
            units += _pick(group, balance([work.own[i] for i in group], min(pieces, len(group))))
        even = [list(chain(*part)) for part in _pick(units, balance([work.tokens(unit) for unit in units], ranks))]
        yield sorted(even, key=work.tokens, reverse=True)
        pieces *= 2


def fill(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Pack indices into few bins of at most `tokens`; a longer sample gets its own bin.

    Uses best fit decreasing (Johnson et al., 1974).
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens of a bin, its index), fewest first
    for i in _longest_first(lengths):
        best = bisect_left(free, (lengths[i],))
        if best == len(free):
            free.append((tokens, len(bins)))
            bins.append([])
        room, chosen = free.pop(best)
        bins[chosen].append(i)
        insort(free, (room - lengths[i], chosen))
    return bins


def _alike(lengths: Sequence[int], limit: MicroLimit, ranks: int) -> list[list[int]]:
    order = _longest_first(lengths)
    parts, start = [], 0
    while start < len(order):
        fit = limit.samples if limit.tokens is None else max(limit.tokens // lengths[order[start]], 1)
        taken = order[start : start + fit * ranks]
        parts += [sorted(taken[rank::ranks]) for rank in range(ranks)]
        start += len(taken)
    return parts


def rounds(
    samples: Sequence[Sample], limit: MicroLimit, world: int, *, padded: bool = False, share_prompts: bool = False
) -> list[list[list[int]]]:
    """Return the micro-batches of each round and rank, as indices into `samples`: [rounds, world].

    Deterministic, so ranks need not communicate. In the last round a rank may have no samples.
    """
    work = SharedPrompts.find(samples, share_prompts and not padded)
    if work.shared:
        parts = split_groups(work, limit, world)
    else:
        parts = split([sample.token_ids.shape[0] for sample in samples], limit, world, padded=padded)
    return [parts[start : start + world] for start in range(0, len(parts), world)]


def fillers(present: Sequence[Sample], together: Sequence[Sample], small: Sequence[Sample] = ()) -> list[Sample]:
    """Return untrained samples that make a micro-batch run the same model parts as the others of its round.

    A rank without pictures would skip the vision tower and its collectives.

    Args:
        present: the micro-batch.
        together: all samples of the round, of every rank.
        small: tiny samples, one per kind of media; if none fits, the round's shortest is used.
    """
    kinds = {name for sample in together for name in sample.input_names}
    small = [sample for sample in small if kinds.issuperset(sample.input_names)]
    added: list[Sample] = []
    for kind in sorted(kinds):
        if not any(kind in sample.input_names for sample in (*present, *added)):
            fitting = [sample for sample in small if kind in sample.input_names]
            added.append(_shortest(fitting or [sample for sample in together if kind in sample.input_names]))
    if not present and not added:
        added.append(_shortest(together))
    return [_untrained(sample, together[0]) for sample in added]


def truncate(sample: Sample, length: int) -> Sample:
    """Return the first tokens of a sample without media."""
    own: dict[str, Any] = {name: value[:length] for name in PER_TOKEN if (value := sample.get(name)) is not None}
    return replace(
        sample,
        token_ids=sample.token_ids[:length],
        loss_mask=sample.loss_mask[:length],
        position_ids=sample.position_ids[:, :length],
        prompt_length=min(sample.prompt_length, length),
        **own,
    )


def _shortest(samples: Sequence[Sample]) -> Sample:
    return min(samples, key=lambda sample: sample.token_ids.shape[0])


def _untrained(sample: Sample, other: Sample) -> Sample:
    zeros: dict[str, Any] = {}
    for name in PER_TOKEN:
        value = other.get(name)
        zeros[name] = None if value is None else value.new_zeros(sample.token_ids.shape[0], *value.shape[1:])
    return replace(sample, loss_mask=torch.zeros_like(sample.loss_mask), **zeros)
