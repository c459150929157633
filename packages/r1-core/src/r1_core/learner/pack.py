"""The layout of a packed row: its segments, and which token attends to which."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from r1_core.learner.sequence import SequenceGroup
from r1_core.prompts import SharedPrompts
from r1_core.types import Sample

NO_PROMPT = -1  # `Pack.behind` of a segment that follows no shared prompt


class Keys(NamedTuple):
    """The tokens that each segment attends to: those of its prompt, then its own."""

    places: Tensor  # int64 [K], positions in the row
    ends: Tensor  # int32 [segments + 1]


@dataclass(frozen=True, eq=False)  # hashed by identity: attention plans are cached per pack
class Pack:
    """The segments of a packed row, as lists for the host and as tensors for kernels.

    A segment is a whole sequence, a shared prompt, or an answer to one. **A token attends to** all of the segment that
    its own follows (`behind`), and to its own segment up to itself.

    Example: samples of 4 and 3 tokens that share nothing have `lengths` [4, 3], `behind` [-1, -1] and `ends` [0, 4, 7];
    if the first two tokens are the prompt of both, `lengths` are [2, 2, 1], `behind` [-1, 0, 0], `ends` [0, 2, 4, 5].
    """

    lengths: list[int]
    behind: list[int]  # the segment that each follows, `NO_PROMPT` if none
    ends: Tensor  # int32 [segments + 1]
    sequence: SequenceGroup | None = None  # the ranks that share the row

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str,
        sequence: SequenceGroup | None = None,
        behind: Sequence[int] | None = None,
    ) -> "Pack":
        """Build a pack from segment lengths; without `behind`, each is a whole sequence."""
        ends = torch.tensor([0, *lengths]).cumsum(0)
        behind = [NO_PROMPT] * len(lengths) if behind is None else behind
        return cls([*lengths], [*behind], ends.to(device, torch.int32), sequence)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def farthest(self) -> int:
        """The length of the longest segment with its prompt."""
        before = [0 if segment == NO_PROMPT else self.lengths[segment] for segment in self.behind]
        return max(map(sum, zip(self.lengths, before, strict=True)))

    @cached_property
    def shared(self) -> bool:
        return any(segment != NO_PROMPT for segment in self.behind)

    @cached_property
    def starts(self) -> list[int]:
        starts, start = [], 0
        for length in self.lengths:
            starts.append(start)
            start += length
        return starts

    @cached_property
    def keys(self) -> Keys:
        """The tokens that each segment's last token attends to; k tokens earlier, all but the last k of them."""
        segments = zip(self.starts, self.lengths, self.behind, strict=True)
        places, ends = list[Tensor](), [0]
        for start, length, behind in segments:
            if behind != NO_PROMPT:
                places.append(torch.arange(self.starts[behind], self.starts[behind] + self.lengths[behind]))
            places.append(torch.arange(start, start + length))
            ends.append(ends[-1] + length + (self.lengths[behind] if behind != NO_PROMPT else 0))
        device = self.ends.device
        return Keys(torch.cat(places).to(device), torch.tensor(ends, dtype=torch.int32).to(device))

    def visible(self) -> Tensor:
        """The attention mask, bool [T, T]: which token (row) attends to which (column). For small rows only."""
        segment = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        place, behind = torch.arange(len(segment)), torch.tensor(self.behind)[segment]
        return (behind[:, None] == segment) | ((segment[:, None] == segment) & (place <= place[:, None]))


class Row(NamedTuple):
    """Where samples are in a packed row. A shared prompt is a segment; its answers follow in the order of samples."""

    segments: list[tuple[int, int, int]]  # (sample, first token, last token + 1)
    behind: list[int]  # as in `Pack`
    places: list[Tensor]  # per sample int64 [L], positions of its tokens in the row

    @property
    def lengths(self) -> list[int]:
        return [end - start for _, start, end in self.segments]


def lay_out(samples: Sequence[Sample], *, share: bool) -> Row:
    """Lay samples out one after another; with `share`, each shared prompt once, followed by its answers."""
    work = SharedPrompts.find(samples, share)
    segments, behind, places, start = list[tuple[int, int, int]](), list[int](), [torch.empty(0)] * len(samples), 0
    for group in work.groups(range(len(samples))):
        prompt = work.lengths[work.prompt[group[0]]] if len(group) > 1 else 0
        before = torch.arange(start, start + prompt)
        prompt_segment = NO_PROMPT
        if prompt:
            prompt_segment = len(segments)
            segments.append((group[0], 0, prompt))
            behind.append(NO_PROMPT)
            start += prompt
        for i in group:
            length = samples[i].token_ids.shape[0]
            segments.append((i, prompt, length))
            behind.append(prompt_segment)
            places[i] = torch.cat([before, torch.arange(start, start + length - prompt)])
            start += length - prompt
    return Row(segments, behind, places)
