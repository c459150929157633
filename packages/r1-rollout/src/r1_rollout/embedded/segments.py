"""Keys and values of sequences of different lengths, cut into segments of columns.

A segment stores only sequences that reach it. Each segment is as long as all before it, so a sequence takes at most
twice its own length in memory and attention, or one first segment.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_rollout.embedded.windows import AttentionWindow

FIRST = 128  # columns of the first segment
# Columns that keys have over and above, never in use. A new token's keys go to every size-th row of a column, and at
# strides of a power of two these fall into few sets of a processor's cache: they are written 1.5 times as fast so.
APART = 16
# Added to scores of columns outside a window. It is finite: a place may see none of a segment's columns, and a softmax
# over -inf alone is NaN. Its share beside a column that is seen is 0.
HIDDEN = -1e30

Numbers = NDArray[np.int64]


class Layer(NamedTuple):
    """One layer's keys and values, in the layout that a CPU's matrix products read at the speed of its memory."""

    keys: Tensor  # [places, heads, size, columns + APART]
    values: Tensor  # [places, heads, columns, size]


class Sight(NamedTuple):
    """The columns of a segment that a layer reads."""

    columns: slice
    hidden: float  # added to the scores of columns that a place does not see; 0: every place sees them all
    bias: Tensor | None = None  # float32 [places, 1, 1, columns], 0 or `hidden`, see `Segment.show`


class Segment:
    """Columns `first` to `last` of the sequences that reach them, each at a place of its own; places stay dense."""

    def __init__(self, first: int, last: int, places: int) -> None:
        self.first, self.last = first, last
        self.owners: Numbers = np.empty(0, np.int64)  # the sequence at each place
        self.changes = 0  # of owners
        self.width = 0  # columns in use
        self.sights: dict[AttentionWindow | None, Sight | None] = {}  # by the layers' window; None: they see no column
        self.layers: list[Layer] = []
        self._most = places

    def enter(self, owners: Sequence[int] | Numbers, kinds: Sequence[Layer]) -> slice:
        """Assign sequences the next places. `kinds` are empty tensors of each layer, without columns."""
        taken = len(self.owners)
        self.changes += len(owners) > 0
        self.owners = np.concatenate([self.owners, np.asarray(owners, np.int64)])
        room = len(self.layers[0].keys) if self.layers else 0
        if len(self.owners) > room:
            places, columns = max(len(self.owners), min(2 * room, self._most)), self.last - self.first
            self.layers = [
                Layer(
                    _grown(keys, places, *keys.shape[1:3], columns + APART),
                    _grown(values, places, values.shape[1], columns, values.shape[3]),
                )
                for keys, values in self.layers or kinds
            ]
        return slice(taken, len(self.owners))

    def leave(self, owners: Collection[int]) -> None:
        leaving = np.flatnonzero(np.isin(self.owners, [*owners])).tolist()
        sources, targets = close_gaps(len(self.owners), leaving)
        if sources and self.layers:  # a GPU waits for each list that becomes a tensor, so all layers share two
            source, target = (torch.tensor(one, device=self.layers[0].keys.device) for one in (sources, targets))
            for keys, values in self.layers:
                keys[target, ..., : self.width] = keys[source, ..., : self.width]
                values[target, :, : self.width] = values[source, :, : self.width]
        self.changes += len(leaving) > 0
        self.owners[targets] = self.owners[sources]
        self.owners = self.owners[: len(self.owners) - len(leaving)]

    def rename(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.changes += len(sources) > 0
        for source, target in zip(sources, targets, strict=True):
            self.owners[self.owners == source] = target

    def see(self, lengths: Numbers, grain: int = 1) -> None:
        """Set how long the sequences are, from the first column of all: int64 [sequences].

        With a `grain` the width is a multiple of it, or all columns.
        """
        here = np.minimum(lengths[self.owners], self.last) - self.first
        self.width = min(-(-int(here.max()) // grain) * grain, self.last - self.first)
        hides = grain > 1 or here.min() < self.width
        self.sights = {**self.sights, None: Sight(slice(0, self.width), -torch.inf if hides else 0)}

    def see_within(self, window: AttentionWindow, begins: Numbers, lengths: Numbers, grain: int = 1) -> None:
        """Set what layers with a window see, after `see`: of each sequence the columns from `begins` to its length.

        Both are counted from the first column of all, int64 [sequences]. With a `grain` the columns begin at a multiple
        of it.
        """
        here = np.minimum(lengths[self.owners], self.last) - self.first
        begin = begins[self.owners] - self.first
        if (begin >= here).all():
            self.sights = {**self.sights, window: None}
            return
        first = max(0, int(begin.min())) // grain * grain
        whole = grain == 1 and begin.max() <= first and here.min() == self.width
        self.sights = {**self.sights, window: Sight(slice(first, self.width), 0 if whole else HIDDEN)}

    def show(self, window: AttentionWindow | None, begins: Tensor | None, ends: Tensor) -> None:
        """Compute on the device which columns each place sees, after `see` or `see_within` of the same numbers.

        Args:
            begins, ends: int64 [places], counted from the first column of all.
        """
        sight = self.sights[window]
        if sight is None or not sight.hidden:
            return
        places = self.first + sight.columns.start, self.first + sight.columns.stop
        columns = torch.arange(*places, device=ends.device)
        seen = columns < ends[:, None]
        if begins is not None:
            seen &= columns >= begins[:, None]
        bias = torch.full(seen.shape, sight.hidden, device=ends.device).masked_fill_(seen, 0.0)
        self.sights = {**self.sights, window: sight._replace(bias=bias[:, None, None])}


@dataclass(frozen=True, slots=True)
class Readers:
    straight: bool  # members, rows and at are all 0, 1, 2, …: nothing need be sorted
    members: Tensor  # int64 [places × most], the rows that read each place, filled up with row 0
    rows: Tensor  # int64 [readers]
    at: Tensor  # int64 [readers], where each of them stands in `members`

    @classmethod
    def of(cls, segment: Segment, sequences: Numbers, device: torch.device) -> "Readers":
        """Return the readers of a segment, if each row reads one of the sequences: int64 [rows]."""
        place_of = np.full(max(sequences.max(), segment.owners.max()) + 1, -1)
        place_of[segment.owners] = np.arange(len(segment.owners))
        places = place_of[sequences]
        rows = np.flatnonzero(places >= 0)
        places = places[rows]
        order, counts = np.argsort(places, kind="stable"), np.bincount(places, minlength=len(segment.owners))
        ranks = np.empty_like(places)
        ranks[order] = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
        at = places * counts.max() + ranks
        members = np.zeros(len(segment.owners) * counts.max(), np.int64)
        members[at] = rows
        straight = len(rows) == len(members) == len(sequences) and bool((at == rows).all())
        return cls(straight, *(torch.from_numpy(array).to(device) for array in (members, rows, at)))

    def sort(self, tensor: Tensor, places: int) -> Tensor:
        """Return the numbers of rows by places: [rows, heads, queries, …] to [places, heads, members × queries, …]."""
        if not self.straight:
            tensor = tensor.index_select(0, self.members)
        if len(tensor) == places:
            return tensor
        return tensor.view(places, -1, *tensor.shape[1:]).transpose(1, 2).flatten(2, 3)

    def unsort(self, tensor: Tensor, queries: int) -> Tensor:
        """Return numbers of places by readers, the reverse of `sort`: [readers, heads, queries, …]."""
        if tensor.shape[2] != queries:
            places, heads, _, size = tensor.shape
            tensor = tensor.view(places, heads, -1, queries, size).transpose(1, 2).flatten(0, 1)
        return tensor if self.straight else tensor.index_select(0, self.at)

    def of_places(self, numbers: Tensor, places: int) -> Tensor:
        """Return of each place the number of the first row that reads it: [rows] -> [places]."""
        if self.straight and len(self.members) == places:
            return numbers
        return numbers[self.members.view(places, -1)[:, 0]]


def cut(places: int, columns: int = 1 << 30) -> list[Segment]:
    segments, first, last = [], 0, FIRST
    while first < columns:
        segments.append(Segment(first, min(last, columns), places))
        first, last = last, 2 * last
    return segments


def close_gaps(count: int, leaving: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return which of `count` places (sources) move to which (targets) to stay dense."""
    left, remaining = frozenset(leaving), count - len(leaving)
    targets = [place for place in leaving if place < remaining]
    sources = [place for place in range(remaining, count) if place not in left]
    return sources, targets


def _grown(tensor: Tensor, *shape: int) -> Tensor:
    # Zeros, because a masked column still meets the softmax's zero weight, and 0 × NaN is NaN.
    larger = tensor.new_zeros(shape)
    if len(tensor):
        larger[: len(tensor)] = tensor
    return larger
