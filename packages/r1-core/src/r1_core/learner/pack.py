"""A packed row: which runs of tokens stand in it one after another, and which token attends to which."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from r1_core.learner.sequence import SequenceGroup
from r1_core.prompts import Work
from r1_core.types import Sample

NOTHING = -1  # what a run looks back on that is no answer to a shared prompt


class Keys(NamedTuple):
    """The tokens that runs attend to, run after run: those of their prompt, then their own."""

    places: Tensor  # int64 [K], where in the row they stand
    ends: Tensor  # int32 [runs + 1]


@dataclass(frozen=True, eq=False)  # a row is itself alone: plans are kept by it
class Pack:
    """Where the runs of a packed row end: for the host, which cuts, and on the device, whose kernels do.

    A run is a sequence of its own, or a prompt, or one of the answers to it, which stand right behind it in the row.
    **Which token attends to which**: to all of the run that its own run looks back on, and to its own run up to itself.
    `visible` says so in full and `keys` to kernels; what goes another way is tested against them.

    Example: samples of 4 and 3 tokens that share nothing have `lengths` [4, 3], `behind` [-1, -1] and `ends` [0, 4, 7];
    if the first two tokens are the prompt of both, `lengths` are [2, 2, 1], `behind` [-1, 0, 0], `ends` [0, 2, 4, 5].
    """

    lengths: list[int]
    behind: list[int]  # the run that each looks back on, `NOTHING` if none
    ends: Tensor  # int32 [runs + 1]
    sequence: SequenceGroup | None = None  # the ranks of which each computes a part of the row

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        sequence: SequenceGroup | None = None,
        behind: Sequence[int] | None = None,
    ) -> "Pack":
        """Runs of these lengths, one after another; without `behind` each is a sequence of its own."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        behind = [NOTHING] * len(lengths) if behind is None else behind
        return cls([*lengths], [*behind], ends.to(device, torch.int32), sequence)

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return max(self.lengths)

    @cached_property
    def farthest(self) -> int:
        """Tokens that a token attends to at most: those of the longest run with what it looks back on."""
        before = [0 if run == NOTHING else self.lengths[run] for run in self.behind]
        return max(map(sum, zip(self.lengths, before, strict=True)))

    @cached_property
    def shared(self) -> bool:
        """Whether any run looks back on another."""
        return any(run != NOTHING for run in self.behind)

    @cached_property
    def starts(self) -> list[int]:
        """Where each run begins."""
        starts, start = [], 0
        for length in self.lengths:
            starts.append(start)
            start += length
        return starts

    @cached_property
    def keys(self) -> Keys:
        """What each run's last token attends to; one that stands k tokens before it to all but the last k."""
        runs = zip(self.starts, self.lengths, self.behind, strict=True)
        places, ends = list[Tensor](), [0]
        for start, length, behind in runs:
            if behind != NOTHING:
                places.append(torch.arange(self.starts[behind], self.starts[behind] + self.lengths[behind]))
            places.append(torch.arange(start, start + length))
            ends.append(ends[-1] + length + (self.lengths[behind] if behind != NOTHING else 0))
        device = self.ends.device
        return Keys(torch.cat(places).to(device), torch.tensor(ends, dtype=torch.int32).to(device))

    def visible(self) -> Tensor:
        """Which token (row) attends to which (column), bool [T, T]: of small rows only."""
        run = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        place, behind = torch.arange(len(run)), torch.tensor(self.behind)[run]
        return (behind[:, None] == run) | ((run[:, None] == run) & (place <= place[:, None]))


class Row(NamedTuple):
    """How samples lie in a packed row. A prompt that several share is a run; their answers follow in their order."""

    runs: list[tuple[int, int, int]]  # a sample, and which of its tokens: from, to
    behind: list[int]  # as in `Pack`
    places: list[Tensor]  # of each sample: int64 [L], where its tokens stand

    @property
    def lengths(self) -> list[int]:
        """Tokens of each run."""
        return [end - start for _, start, end in self.runs]


def lay_out(samples: Sequence[Sample], *, share: bool) -> Row:
    """Lay samples one after another; with `share`, those that share a prompt behind the one prompt."""
    work = Work.of(samples, share)
    runs, behind, places, start = list[tuple[int, int, int]](), list[int](), [torch.empty(0)] * len(samples), 0
    for group in work.groups(range(len(samples))):
        prompt = work.lengths[work.prompt[group[0]]] if len(group) > 1 else 0
        before = torch.arange(start, start + prompt)
        looks_back_on = NOTHING
        if prompt:
            looks_back_on = len(runs)
            runs.append((group[0], 0, prompt))
            behind.append(NOTHING)
            start += prompt
        for i in group:
            length = samples[i].token_ids.shape[0]
            runs.append((i, prompt, length))
            behind.append(looks_back_on)
            places[i] = torch.cat([before, torch.arange(start, start + length - prompt)])
            start += length - prompt
    return Row(runs, behind, places)
