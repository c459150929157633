"""Attention of answers to their shared prompts on processors: no product is computed twice, and none for a mask.

What a token of an answer sees is cut in two, the prompt and its own answer. All answers to a prompt look at it in one
call, as one long answer would; and each looks at itself, in one call for those of about the same length. The halves are
joined by the sums of their exponentials, as FlashAttention joins blocks (arXiv 2205.14135). Going backward, the kernel
finds each half's share of the gradient from the joined sums.

Where a prompt and all its answers are but a few tokens, calls cost more than products: many such groups go through one
call, with a mask.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from r1_core.learner.pack import NO_PROMPT, Pack

ALIKE = 0.75  # of runs that go through one call the shortest has this share of the longest's tokens, at least
ALONE = 128  # tokens of a run that is not gathered for a call with others: it goes by itself, from where it lies
FEW = 192  # tokens of a prompt and all its answers that go through a call with other groups

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_to_prompts(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float | None) -> Tensor:
    """Attend as `pack` says, on a processor.

    Args:
        query: [1, heads, T, head size]; key and value [1, key heads, T, head size].
        scale: of the products; None: 1 / √(head size).

    Returns:
        [1, T, heads, head size].
    """
    found: Tensor = _Attention.apply(query[0], key[0], value[0], make_plan(pack), scale)
    return found.transpose(0, 1)[None]


# --- which calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentBatch:
    """Runs that go through one call: some of their last tokens stand in the place of those that the shorter lack.

    With a mask they are no runs but whole groups, each a prompt and all its answers.
    """

    places: Tensor  # int64 [runs × longest], of the row
    kept: Tensor | None  # int64 [tokens], which of these are no repetitions; None: all
    runs: int
    mask: Tensor | None = None  # float32 [runs, 1, longest, longest], added to the products; None: tokens look back

    def take(self, tensor: Tensor) -> Tensor:
        """From [heads, T, …] to [runs, heads, longest, …]."""
        return tensor.index_select(1, self.places).unflatten(1, (self.runs, -1)).transpose(0, 1)

    def put(self, found: Tensor, tensor: Tensor) -> None:
        """Put what `take` would take, [runs, heads, longest, …], where it lies in [heads, T, …]."""
        flat, places = found.transpose(0, 1).flatten(1, 2), self.places
        if self.kept is not None:
            flat, places = flat.index_select(1, self.kept), places[self.kept]
        tensor.index_copy_(1, places, flat)

    def mask_like(self, tensor: Tensor) -> Tensor | None:
        """The mask in a tensor's precision."""
        return None if self.mask is None else self.mask.to(tensor.dtype)

    def blank(self, taken: Tensor) -> Tensor:
        """Set the repetitions in [runs, heads, longest, size] to 0."""
        if self.kept is None:
            return taken
        own = torch.zeros(len(self.places), 1, dtype=taken.dtype).index_fill_(0, self.kept, 1.0)
        return taken * own.view(self.runs, 1, -1, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """The calls that a row takes.

    Example: of a prompt of 200 tokens with answers of 3 and 4 `alone` is [(0, 200)], `alike` has both answers, and
    `across` is [(0, 200, 207)].
    """

    alone: list[tuple[int, int]]  # runs, from where to where
    alike: list[SegmentBatch]  # runs, and groups
    across: list[tuple[int, int, int]]  # where a prompt begins, where its answers do, and where they end


@lru_cache(maxsize=4)
def make_plan(pack: Pack) -> Plan:
    """The plan of a row, for which all layers of a forward and a backward pass ask."""
    spans = [(start, start + length) for start, length in zip(pack.starts, pack.lengths, strict=True)]
    small, alone, short, across = list[list[int]](), list[tuple[int, int]](), list[list[int]](), list[list[int]]()
    for runs in _families(pack):
        if len(runs) > 1 and spans[runs[-1]][1] - spans[runs[0]][0] <= FEW:
            small.append(runs)
            continue
        for run in runs:
            if pack.lengths[run] > ALONE:
                alone.append(spans[run])
            else:
                short.append([run])
        if len(runs) > 1:
            across.append(runs)
    return Plan(
        alone,
        [_gather(pack, group) for runs in (short, small) for group in _of_like_length(runs, pack)],
        [(spans[runs[0]][0], spans[runs[1]][0], spans[runs[-1]][1]) for runs in across],
    )


def _families(pack: Pack) -> list[list[int]]:
    """Each prompt with its answers, which stand behind it, and each run that is neither."""
    found: list[list[int]] = []
    for run, behind in enumerate(pack.behind):
        if behind == NO_PROMPT:
            found.append([run])
        else:
            found[-1].append(run)
    return found


def _of_like_length(members: list[list[int]], pack: Pack) -> list[list[list[int]]]:
    """Cut runs, or groups of them, into those that may go through one call, of which the first is the longest."""
    found: list[list[list[int]]] = []
    for runs in sorted(members, key=lambda runs: (-_tokens(runs, pack), runs)):
        if found and _tokens(runs, pack) >= ALIKE * _tokens(found[-1][0], pack):
            found[-1].append(runs)
        else:
            found.append([runs])
    return found


def _tokens(runs: list[int], pack: Pack) -> int:
    return sum(pack.lengths[run] for run in runs)


def _gather(pack: Pack, members: list[list[int]]) -> SegmentBatch:
    """One call for runs, or for groups of them, of which the first is the longest."""
    starts = torch.tensor([pack.starts[runs[0]] for runs in members])
    lengths = torch.tensor([_tokens(runs, pack) for runs in members])
    own = torch.arange(int(lengths[0])) < lengths[:, None]
    inside = torch.minimum(torch.arange(int(lengths[0])), lengths[:, None] - 1)
    kept = None if bool(own.all()) else own.flatten().nonzero().squeeze(-1)
    places = (starts[:, None] + inside).flatten()
    if all(len(runs) == 1 for runs in members):
        return SegmentBatch(places, kept, len(members))
    mask = torch.full((len(members), 1, own.shape[1], own.shape[1]), -torch.inf)
    for group, runs in enumerate(members):
        answers = len(runs) - 1
        seen = Pack.of([pack.lengths[run] for run in runs], "cpu", behind=[NO_PROMPT, *[0] * answers]).visible()
        mask[group, 0, :, : len(seen)].masked_fill_(seen[inside[group]], 0.0)
    return SegmentBatch(places, kept, len(members), mask)


# --- the calls -------------------------------------------------------------------------------------------------------


class _Attention(Function):
    """Query [heads, T, size], key and value [key heads, T, size] → [heads, T, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Plan, scale: float | None) -> Tensor:
        times = query.shape[0] // key.shape[0]
        heads, tokens, size = query.shape
        found = query.new_empty(tokens, heads, size).transpose(0, 1)
        sums = query.new_empty(heads, tokens, dtype=torch.promote_types(query.dtype, torch.float32))
        for span in plan.alone:
            own = slice(*span)
            half = _flash(*_laid(times, query[:, own], key[:, own], value[:, own]), 0.0, True, scale=scale)
            found[:, own], sums[:, own] = (each.flatten(0, 1) for each in half)
        for runs in plan.alike:
            given = runs.take(query), *(runs.take(each).repeat_interleave(times, 1) for each in (key, value))
            half = _flash(*given, 0.0, runs.mask is None, attn_mask=runs.mask_like(query), scale=scale)
            runs.put(half[0], found)
            runs.put(half[1], sums)
        for begin, start, end in plan.across:
            prompt, answers = slice(begin, start), slice(start, end)
            half = _flash(*_laid(times, query[:, answers], key[:, prompt], value[:, prompt]), 0.0, False, scale=scale)
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
            rows = (_split(each[:, own], times) for each in (found, sums))
            given = _laid(times, query[:, own], key[:, own], value[:, own])
            own_grads = _flash_backward(_split(grad[:, own], times), *given, *rows, 0.0, True, scale=scale)
            for total, one in zip(totals, _joined(own_grads), strict=True):
                total[:, own] = one
        for runs in ctx.plan.alike:
            given = runs.take(query), *(runs.take(each).repeat_interleave(times, 1) for each in (key, value))
            rows = (runs.take(each) for each in (found, sums))
            blank, looks_back, mask = runs.blank(runs.take(grad)), runs.mask is None, runs.mask_like(query)
            q, *others = _flash_backward(blank, *given, *rows, 0.0, looks_back, attn_mask=mask, scale=scale)
            summed = (each.unflatten(1, (-1, times)).sum(2) for each in others)
            for total, one in zip(totals, (q, *summed), strict=True):
                runs.put(one, total)
        for begin, start, end in ctx.plan.across:
            prompt, answers = slice(begin, start), slice(start, end)
            rows = (_split(each[:, answers], times) for each in (found, sums))
            given = _laid(times, query[:, answers], key[:, prompt], value[:, prompt])
            own_grads = _flash_backward(_split(grad[:, answers], times), *given, *rows, 0.0, False, scale=scale)
            for total, where, one in zip(totals, (answers, prompt, prompt), _joined(own_grads), strict=True):
                total[:, where] += one
        return *totals, None, None


def _split(tensor: Tensor, times: int) -> Tensor:
    """From [heads, …] to [key heads, heads a key head, …]."""
    return tensor.unflatten(0, (-1, times))


def _laid(times: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key heads as a batch, whose queries see the same keys: nothing is copied."""
    key, value = (each[:, None].expand(-1, times, -1, -1) for each in (key, value))
    return _split(query, times), key, value


def _joined(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of what `_laid` was given."""
    return grads[0].flatten(0, 1), grads[1].sum(1), grads[2].sum(1)
