"""Attention of answers to their shared prompts on processors, without repeated or masked products.

All answers attend to their prompt in one call, and to themselves in one call per similar length. The results are merged
by the log-sum-exp of their scores, as FlashAttention merges blocks (arXiv 2205.14135); in the backward pass the kernel
computes each part's gradient from the merged sums. Small groups share one call with a mask, as calls would cost more
than products.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from r1_core.learner.pack import NO_PROMPT, Pack

MIN_LENGTH_RATIO = 0.75  # of the shortest segment of a call to the longest one
SINGLE_TOKENS = 128  # above this a segment has a call of its own, without copies
SMALL_GROUP_TOKENS = 192  # up to this a prompt and all its answers share a call with other groups

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_to_prompts(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float | None) -> Tensor:
    """Attend within `pack`'s segments; shapes as in `attention.packed_attention`."""
    found: Tensor = _Attention.apply(query[0], key[0], value[0], make_plan(pack), scale)
    return found.transpose(0, 1)[None]


# --- plan ------------------------------------------------------------------------------------------------------------


# The tokens and the segments of a prompt with all its answers, or of one segment.
_Member: TypeAlias = tuple[int, list[int]]


@dataclass(frozen=True, eq=False)
class SegmentBatch:
    """Segments of one call, padded with repetitions of their last token.

    With a mask they are whole groups, each a prompt and all its answers.
    """

    positions: Tensor  # int64 [segments × longest], in the row
    kept: Tensor | None  # int64 [tokens], indices of `positions` that are no repetitions; None: all
    segments: int
    mask: Tensor | None = None  # float32 [segments, 1, longest, longest], added to the scores; None: causal

    @cached_property
    def kept_positions(self) -> Tensor:
        return self.positions if self.kept is None else self.positions[self.kept]

    @cached_property
    def is_own(self) -> Tensor:
        """1 where `positions` is no repetition, else 0: float32 [segments, 1, longest, 1]. Only with `kept`."""
        assert self.kept is not None
        return torch.zeros(len(self.positions)).index_fill_(0, self.kept, 1.0).view(self.segments, 1, -1, 1)

    def gather(self, tensor: Tensor, times: int = 1) -> Tensor:
        """From [heads, T, …] to [segments, heads × `times`, longest, …], each head repeated."""
        taken = tensor.index_select(1, self.positions).unflatten(1, (self.segments, -1)).transpose(0, 1)
        return taken if times == 1 else taken[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)

    def scatter(self, found: Tensor, tensor: Tensor) -> None:
        """Write [segments, heads, longest, …] to its positions in [heads, T, …]; the inverse of `gather`."""
        flat = found.transpose(0, 1).flatten(1, 2)
        tensor.index_copy_(1, self.kept_positions, flat if self.kept is None else flat.index_select(1, self.kept))

    def mask_like(self, tensor: Tensor) -> Tensor | None:
        return None if self.mask is None else self.mask.to(tensor.dtype)

    def zero_repeats(self, taken: Tensor) -> Tensor:
        return taken if self.kept is None else taken * self.is_own.to(taken.dtype)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls of a row.

    Example: of a prompt of 200 tokens with answers of 3 and 4 `alone` is [(0, 200)], `alike` has both answers, and
    `across` is [(0, 200, 207)].
    """

    alone: list[tuple[int, int]]  # start and end of segments
    alike: list[SegmentBatch]  # segments, and groups
    across: list[tuple[int, int, int]]  # starts of a prompt and of its answers, and their end


@lru_cache(maxsize=4)
def make_plan(pack: Pack) -> AttentionPlan:
    """Return the plan of a row, cached for all layers of a pass."""
    spans = [(start, start + length) for start, length in zip(pack.starts, pack.lengths, strict=True)]
    small, short = list[_Member](), list[_Member]()
    alone, across = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for segments in _prompt_groups(pack):
        begin, end = spans[segments[0]][0], spans[segments[-1]][1]
        if len(segments) > 1 and end - begin <= SMALL_GROUP_TOKENS:
            small.append((end - begin, segments))
            continue
        for segment in segments:
            if pack.lengths[segment] > SINGLE_TOKENS:
                alone.append(spans[segment])
            else:
                short.append((pack.lengths[segment], [segment]))
        if len(segments) > 1:
            across.append((begin, spans[segments[1]][0], end))
    return AttentionPlan(
        alone, [_make_batch(pack, batch) for members in (short, small) for batch in _group_by_length(members)], across
    )


def _prompt_groups(pack: Pack) -> list[list[int]]:
    """Return each prompt with its answers, and other segments alone."""
    found: list[list[int]] = []
    for segment, behind in enumerate(pack.behind):
        if behind == NO_PROMPT:
            found.append([segment])
        else:
            found[-1].append(segment)
    return found


def _group_by_length(members: list[_Member]) -> list[list[_Member]]:
    found: list[list[_Member]] = []
    for member in sorted(members, key=lambda one: (-one[0], one[1])):
        if found and member[0] >= MIN_LENGTH_RATIO * found[-1][0][0]:
            found[-1].append(member)
        else:
            found.append([member])
    return found


def _make_batch(pack: Pack, members: list[_Member]) -> SegmentBatch:
    starts = torch.tensor([pack.starts[segments[0]] for _, segments in members])
    lengths = torch.tensor([tokens for tokens, _ in members])
    own = torch.arange(int(lengths[0])) < lengths[:, None]
    inside = torch.minimum(torch.arange(int(lengths[0])), lengths[:, None] - 1)
    kept = None if bool(own.all()) else own.flatten().nonzero().squeeze(-1)
    positions = (starts[:, None] + inside).flatten()
    if all(len(segments) == 1 for _, segments in members):
        return SegmentBatch(positions, kept, len(members))
    segment = torch.arange(len(pack.lengths)).repeat_interleave(torch.tensor(pack.lengths))[positions].view_as(own)
    prompt = torch.tensor([segments[0] for _, segments in members])[:, None]
    seen = (segment == prompt)[:, None] | (segment[:, :, None] == segment[:, None])
    seen &= own[:, None] & (torch.arange(own.shape[1]) <= inside[:, :, None])
    mask = torch.where(seen, 0.0, -torch.inf)[:, None]
    return SegmentBatch(positions, kept, len(members), mask)


# --- the calls -------------------------------------------------------------------------------------------------------


class _Attention(Function):
    """Query [heads, T, size], key and value [key heads, T, size] → [heads, T, size]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float | None
    ) -> Tensor:
        times = query.shape[0] // key.shape[0]
        heads, tokens, size = query.shape
        found = query.new_empty(tokens, heads, size).transpose(0, 1)
        sums = query.new_empty(heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        for span in plan.alone:
            own = slice(*span)
            half = _flash(*_expand_heads(times, query[:, own], key[:, own], value[:, own]), 0.0, True, scale=scale)
            found[:, own], sums[:, own] = (each.flatten(0, 1) for each in half)
        for segments in plan.alike:
            given = segments.gather(query), segments.gather(key, times), segments.gather(value, times)
            half = _flash(*given, 0.0, segments.mask is None, attn_mask=segments.mask_like(query), scale=scale)
            segments.scatter(half[0], found)
            segments.scatter(half[1], sums)
        for begin, start, end in plan.across:
            prompt, answers = slice(begin, start), slice(start, end)
            half = _flash(
                *_expand_heads(times, query[:, answers], key[:, prompt], value[:, prompt]), 0.0, False, scale=scale
            )
            other, its_sums = (each.flatten(0, 1) for each in half)
            share = torch.sigmoid(its_sums - sums[:, answers])[..., None]
            found[:, answers] = torch.lerp(found[:, answers].to(share.dtype), other.to(share.dtype), share)
            sums[:, answers] = torch.logaddexp(sums[:, answers], its_sums)
        ctx.save_for_backward(query, key, value, found, sums)
        ctx.plan, ctx.scale = plan, scale
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, found, sums = ctx.saved_tensors
        (grad,), scale, times = grads, ctx.scale, query.shape[0] // key.shape[0]
        totals = [torch.empty_like(each) for each in (query, key, value)]
        for span in ctx.plan.alone:
            own = slice(*span)
            rows = (_split_heads(each[:, own], times) for each in (found, sums))
            given = _expand_heads(times, query[:, own], key[:, own], value[:, own])
            own_grads = _flash_backward(_split_heads(grad[:, own], times), *given, *rows, 0.0, True, scale=scale)
            for total, one in zip(totals, _merge_head_grads(own_grads), strict=True):
                total[:, own] = one
        for segments in ctx.plan.alike:
            given = segments.gather(query), segments.gather(key, times), segments.gather(value, times)
            rows = (segments.gather(each) for each in (found, sums))
            masked_grad, looks_back, mask = (
                segments.zero_repeats(segments.gather(grad)),
                segments.mask is None,
                segments.mask_like(query),
            )
            q, *others = _flash_backward(masked_grad, *given, *rows, 0.0, looks_back, attn_mask=mask, scale=scale)
            summed = (each.unflatten(1, (-1, times)).sum(2) for each in others)
            for total, one in zip(totals, (q, *summed), strict=True):
                segments.scatter(one, total)
        for begin, start, end in ctx.plan.across:
            prompt, answers = slice(begin, start), slice(start, end)
            rows = (_split_heads(each[:, answers], times) for each in (found, sums))
            given = _expand_heads(times, query[:, answers], key[:, prompt], value[:, prompt])
            own_grads = _flash_backward(_split_heads(grad[:, answers], times), *given, *rows, 0.0, False, scale=scale)
            for total, where, one in zip(totals, (answers, prompt, prompt), _merge_head_grads(own_grads), strict=True):
                total[:, where] += one
        return *totals, None, None


def _split_heads(tensor: Tensor, times: int) -> Tensor:
    """From [heads, …] to [key heads, heads a key head, …]."""
    return tensor.unflatten(0, (-1, times))


def _expand_heads(times: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make key heads the batch, without copies: the queries of each share its keys."""
    key, value = (each[:, None].expand(-1, times, -1, -1) for each in (key, value))
    return _split_heads(query, times), key, value


def _merge_head_grads(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return grads[0].flatten(0, 1), grads[1].sum(1), grads[2].sum(1)
