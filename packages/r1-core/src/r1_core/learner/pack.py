"""The layout of a packed row: shared prompts, segments, and the ranks that share it.

Ulysses sequence parallelism (arXiv 2309.14509): each of n ranks holds T / n neighbouring tokens of a row. For
attention, the ranks exchange tokens for heads: each attends over all tokens with h / n heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import _functional_collectives as collectives

from r1_core.types import Sample, ranges


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The tokens that a forward pass computes: each prompt once, and each sample's own tokens after it.

    Example: answers of 3 and 2 tokens to a prompt of 5, and a sample of 4 without a prompt to share: `own` [3, 2, 4],
    `prompt` [0, 0, 1] and `lengths` [5, 0]. All three together are 14 tokens.
    """

    own: list[int]  # [N], tokens after the prompt
    prompt: list[int]  # [N], index of the sample's prompt
    lengths: list[int]  # [prompts], tokens of each; 0 for a sample without one to share

    @classmethod
    def find(cls, samples: Sequence[Sample], share: bool = True) -> "SharedPrompts":
        """Find samples whose prompts are equal in tokens, positions and model inputs; without `share`, none are."""
        own, prompt, lengths = list[int](), list[int](), list[int]()
        seen: dict[tuple[object, ...], int] = {}
        for i, sample in enumerate(samples):
            whole, start = sample.token_ids.shape[0], sample.prompt_length
            shared = start if share and 0 < start < whole else 0
            place = seen.setdefault(_key(sample) if shared else (i,), len(lengths))
            if place == len(lengths):
                lengths.append(shared)
            own.append(whole - shared)
            prompt.append(place)
        return cls(own, prompt, lengths)

    @property
    def shared(self) -> bool:
        return len(self.lengths) < len(self.own)

    def tokens(self, indices: Sequence[int]) -> int:
        """Count the tokens that these samples compute together."""
        return sum(self.in_order(indices))

    def in_order(self, indices: Sequence[int]) -> list[int]:
        """Return the tokens that each sample adds to those before it: its own, and its prompt if that is new."""
        seen: set[int] = set()
        added = []
        for i in indices:
            prompt = self.prompt[i]
            added.append(self.own[i] if prompt in seen else self.own[i] + self.lengths[prompt])
            seen.add(prompt)
        return added

    def groups(self, indices: Iterable[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for i in indices:
            found.setdefault(self.prompt[i], []).append(i)
        return list(found.values())


def _key(sample: Sample) -> tuple[object, ...]:
    """Identify a sample's prompt. The first axis of positions only counts tokens, so it is left out."""
    start = sample.prompt_length
    tokens, positions = sample.token_ids.numpy(force=True)[:start], sample.position_ids.numpy(force=True)[1:, :start]
    inputs = id(sample.model_inputs) if sample.model_inputs else None
    return start, tokens.tobytes(), positions.tobytes(), inputs


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The ranks that share every row; this rank has part `rank` of `size`."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part along `dim`, whose length is a multiple of `size`."""
        return tensor.chunk(self.size, dim)[self.rank]

    def gather_tokens(self, own: Tensor) -> Tensor:
        """Exchange own tokens of all heads [1, h, T / n, d] for all tokens of own heads [1, h / n, T, d].

        Needs at least as many heads as ranks; see `repeat_heads`.
        """
        _, heads, tokens, size = own.shape
        received = self._exchange(own[0]).view(self.size, heads // self.size, tokens, size)
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, size)

    def gather_heads(self, own: Tensor) -> Tensor:
        """Exchange all tokens of own heads [1, T, h / n, d] for own tokens of all heads [1, T / n, h, d]."""
        _, tokens, heads, size = own.shape
        received = self._exchange(own[0]).view(self.size, tokens // self.size, heads, size)
        return received.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, size)

    def repeat_heads(self, key: Tensor) -> Tensor:
        """Repeat key heads [1, k, T / n, d] until there is one per rank."""
        return key.repeat_interleave(self.size // key.shape[1], dim=1) if key.shape[1] < self.size else key

    def _exchange(self, rows: Tensor) -> Tensor:
        return collectives.wait_tensor(
            collectives.all_to_all_single_autograd(rows.contiguous(), None, None, group=self.group)
        )


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Which of a row's `total` trained tokens are predicted by this rank.

    They need not be neighbours: the last token of a shared prompt predicts the first token of all its answers.
    """

    sequence: SequenceGroup
    own: Tensor  # int64 [T'], ascending
    total: int

    def spread(self, own: Tensor) -> Tensor:
        """Scatter values of own tokens [T', k] into zeros [total, k]."""
        return own.new_zeros(self.total, own.shape[-1]).index_copy(0, self.own, own)

    def gather(self, own: Tensor) -> Tensor:
        """Return the values [total, k] of all ranks, given this rank's [T', k]."""
        found: Tensor = _Sum.apply(self.spread(own), self.sequence.group)
        return found


class _Sum(Function):
    """All-reduce whose backward returns the gradient unchanged, because every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


# Arguments of a decoder, and their dimension of tokens.
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}


@contextmanager
def cut_shared_row(model: Any) -> Iterator[None]:
    """Make a Hugging Face model's decoder compute only this rank's part of a row whose `Pack` has a `sequence`.

    The vision tower, which runs before the decoder, sees all pictures on all ranks. The hook goes with the context: an
    engine that found it on the model it shares would leave its faster decoder, and a GPU's graphs with it.
    """
    hook = model.get_decoder().register_forward_pre_hook(_cut, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _cut(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    sequence, own = kwargs["pack"].sequence, dict(kwargs)
    for name, dim in TOKENS.items():
        if own.get(name) is not None:
            own[name] = sequence.part(own[name], dim).contiguous()
    visual = own.get("visual_pos_masks")  # Qwen3-VL also adds picture features in later layers
    if visual is not None:
        own["visual_pos_masks"] = sequence.part(visual, 1)
        counts = [int(part.sum()) for part in visual.chunk(sequence.size, 1)]
        features = own.get("deepstack_visual_embeds") or ()
        own["deepstack_visual_embeds"] = [layer.split(counts)[sequence.rank] for layer in features]
    return args, own


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
        return self.behind.count(NO_PROMPT) < len(self.behind)

    @cached_property
    def grouped(self) -> bool:
        """Whether all answers follow their prompt, and nothing else stands between them."""
        pairs = zip(range(len(self.behind)), self.behind, [NO_PROMPT, *self.behind], strict=False)
        return all(prompt in (NO_PROMPT, place - 1, before) for place, prompt, before in pairs)

    @cached_property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths[:-1])]

    @cached_property
    def keys(self) -> Keys:
        """The tokens that each segment's last token attends to; k tokens earlier, all but the last k of them."""
        spans, ends = list[tuple[int, int]](), [0]
        for start, length, behind in zip(self.starts, self.lengths, self.behind, strict=True):
            before = [] if behind == NO_PROMPT else [(self.starts[behind], self.lengths[behind])]
            spans += [*before, (start, length)]
            ends.append(ends[-1] + length + sum(tokens for _, tokens in before))
        device = self.ends.device
        places = ranges(*zip(*spans, strict=True))
        return Keys(places.to(device), torch.tensor(ends, dtype=torch.int32).to(device))

    @cached_property
    def places(self) -> Tensor:
        """Where each token is in its sequence, int64 [T]."""
        before = [0 if segment == NO_PROMPT else self.lengths[segment] for segment in self.behind]
        return ranges(before, self.lengths).to(self.ends.device)

    def chunked(self, size: int) -> "Pack":
        """Return the pack in which each sequence is cut into chunks of `size` tokens that do not see one another.

        An answer begins in its prompt's last chunk, unless that is full. Example: with chunks of 4, answers of 3 and 6
        tokens to a prompt of 6 have `lengths` [4, 2, 2, 1, 2, 4] and `behind` [-1, -1, 1, -1, 1, -1].
        """
        lengths, behind, lasts = list[int](), list[int](), list[int]()
        for length, prompt in zip(self.lengths, self.behind, strict=True):
            room = 0 if prompt == NO_PROMPT else -self.lengths[prompt] % size
            if room and length:
                behind.append(lasts[prompt])
                lengths.append(min(room, length))
                length -= lengths[-1]
            pieces = [min(size, length - first) for first in range(0, length, size)]
            lengths += pieces
            behind += [NO_PROMPT] * len(pieces)
            lasts.append(len(lengths) - 1)
        return Pack.of(lengths, self.ends.device, self.sequence, behind)

    def visible(self) -> Tensor:
        """The attention mask, bool [T, T]: which token (row) attends to which (column). For small rows only."""
        segment = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        place, behind = torch.arange(len(segment)), torch.tensor(self.behind)[segment]
        return (behind[:, None] == segment) | ((segment[:, None] == segment) & (place <= place[:, None]))


class Row(NamedTuple):
    """Where samples are in a packed row. A shared prompt is a segment; its answers follow in the order of samples."""

    segments: list[tuple[int, int, int]]  # (sample, first token, last token + 1)
    behind: list[int]  # as in `Pack`
    places: Tensor  # int64, positions in the row of all tokens of the samples, sample after sample


def lay_out(samples: Sequence[Sample], *, share: bool) -> Row:
    """Lay samples out one after another; with `share`, each shared prompt once, followed by its answers."""
    work = SharedPrompts.find(samples, share)
    segments, behind, start = list[tuple[int, int, int]](), list[int](), 0
    spans = [(0, 0)] * (2 * len(samples))  # first position and tokens of each sample's prompt, and of the rest
    for group in work.groups(range(len(samples))):
        prompt = work.lengths[work.prompt[group[0]]] if len(group) > 1 else 0
        before, prompt_segment = (start, prompt), NO_PROMPT
        if prompt:
            prompt_segment = len(segments)
            segments.append((group[0], 0, prompt))
            behind.append(NO_PROMPT)
            start += prompt
        for i in group:
            length = samples[i].token_ids.shape[0]
            segments.append((i, prompt, length))
            behind.append(prompt_segment)
            spans[2 * i : 2 * i + 2] = before, (start, length - prompt)
            start += length - prompt
    return Row(segments, behind, ranges(*zip(*spans, strict=True)))
