"""Attention of answers to their shared prompts on processors: no product is computed twice, and none for a mask.

What a token of an answer sees is cut in two, the prompt and its own answer. All answers to a prompt look at it in one
call, as one long answer would; and each looks at itself, in one call for those of about the same length. The halves are
joined by the sums of their exponentials, as FlashAttention joins blocks (arXiv 2205.14135). Going backward, the kernel
finds each half's share of the gradient from the joined sums.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from r1_core.learner.pack import NOTHING, Pack

ALIKE = 0.75  # of runs that go through one call the shortest has this share of the longest's tokens, at least
ALONE = 128  # tokens of a run that is not gathered for a call with others: it goes by itself, from where it lies

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
class Alike:
    """Runs that go through one call: some of their last tokens stand in the place of those that the shorter lack."""

    places: Tensor  # int64 [runs × longest], of the row
    kept: Tensor | None  # int64 [tokens], which of these are no repetitions; None: all
    runs: int

    def take(self, tensor: Tensor) -> Tensor:
        """From [heads, T, …] to [runs, heads, longest, …]."""
        return tensor.index_select(1, self.places).unflatten(1, (self.runs, -1)).transpose(0, 1)

    def put(self, found: Tensor, tensor: Tensor) -> None:
        """Put what `take` would take, [runs, heads, longest, …], where it lies in [heads, T, …]."""
        flat, places = found.transpose(0, 1).flatten(1, 2), self.places
        if self.kept is not None:
            flat, places = flat.index_select(1, self.kept), places[self.kept]
        tensor.index_copy_(1, places, flat)

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
    alike: list[Alike]
    across: list[tuple[int, int, int]]  # where a prompt begins, where its answers do, and where they end


@lru_cache(maxsize=4)
def make_plan(pack: Pack) -> Plan:
    """The plan of a row, for which all layers of a forward and a backward pass ask."""
    spans = [(start, start + length) for start, length in zip(pack.starts, pack.lengths, strict=True)]
    alone, together = list[tuple[int, int]](), list[list[tuple[int, int]]]()
    for span in sorted(spans, key=lambda span: (span[0] - span[1], span)):  # the longest first
        if _length(span) > ALONE:
            alone.append(span)
        elif together and _length(span) >= ALIKE * _length(together[-1][0]):
            together[-1].append(span)
        else:
            together.append([span])
    across = []
    for behind, runs in groupby(range(len(spans)), key=lambda run: pack.behind[run]):
        if behind != NOTHING:
            answers = [spans[run] for run in runs]
            across.append((spans[behind][0], answers[0][0], answers[-1][1]))
    return Plan(alone, [_gather(runs) for runs in together], across)


def _length(span: tuple[int, int]) -> int:
    return span[1] - span[0]


def _gather(spans: list[tuple[int, int]]) -> Alike:
    """One call for runs, of which the first is the longest."""
    starts, ends = torch.tensor(spans).unbind(1)
    places = starts[:, None] + torch.arange(_length(spans[0]))
    own = (places < ends[:, None]).flatten()
    kept = None if bool(own.all()) else own.nonzero().squeeze(-1)
    return Alike(torch.minimum(places, ends[:, None] - 1).flatten(), kept, len(spans))


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
            half = _flash(*given, 0.0, True, scale=scale)
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
            q, *others = _flash_backward(runs.blank(runs.take(grad)), *given, *rows, 0.0, True, scale=scale)
            for total, one in zip(
                totals, (q, *(each.unflatten(1, (-1, times)).sum(2) for each in others)), strict=True
            ):
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
