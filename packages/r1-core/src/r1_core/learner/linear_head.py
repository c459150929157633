"""Statistics of tokens under a linear head, in chunks, so that the logits of all tokens never exist at once.

Statistics are log-prob, entropy (nats) and the sum of squared probabilities. The gradient with respect to the logits is

    g · (onehot − p) − e · p · (log p + H),    g = ∂loss/∂log-prob, e = ∂loss/∂entropy, H the entropy,

Hidden states and head get their gradients from it in one of three ways:

- The head is frozen: g and e scale two vectors per token, computed in the forward pass.
- The loss is token-wise: g and e of a chunk depend on its own statistics, so the forward pass computes all gradients.
- Otherwise the backward pass computes the logits again, a fourth matrix product. Its chunks are some of the
  vocabulary with all tokens, so half precision needs no float32 accumulator.

Factors of whole rows (g, the temperature, the sum of exponentials) are applied to [T, H], not to logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

LOGPROB, ENTROPY, SQUARED_PROBS = range(3)  # the columns of stats [T, 3]
CHUNK_BYTES = 1 << 28  # of one chunk's logits; there are two such buffers
LOGIT_FLOOR = -1e30  # replaces a banned token's logit −inf: its probability is 0, and 0·inf would be NaN

LossGradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HeadSettings:
    dtype: torch.dtype  # of matrix products; all else is float32, or float64 with float64
    temperature: float = 1.0
    entropy_gradient: bool = False
    squared_probs: bool = False  # 0 in the stats unless asked for


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: HeadSettings,
    *,
    loss_gradient: LossGradient | None = None,
    store: Tensor | None = None,
) -> Tensor:
    """Return statistics [T, 3] of targets [T] under softmax((hidden [T, H] · weight [V, H]ᵀ + bias [V]) / temperature).

    Log-probs have a gradient; entropies only with `entropy_gradient`; squared probabilities never.

    Args:
        loss_gradient: of a token-wise loss: ∂loss/∂stats [T, 3] given stats, called once per chunk, while later rows
            are still 0. Backward raises RuntimeError if it receives another gradient.
        store: [V, H], to which the weight's gradient is added instead of going through autograd; requires backward.
            Ignored unless float32 or float64.
    """
    trains_head = weight.requires_grad or (bias is not None and bias.requires_grad)
    if store is not None and store.dtype != _precise(settings.dtype):
        store = None
    stats: Tensor
    if not torch.is_grad_enabled() or (trains_head and loss_gradient is None):
        stats = _Recomputed.apply(hidden, weight, bias, targets, settings, store)
    elif trains_head:
        stats = _TokenWise.apply(hidden, weight, bias, targets, settings, loss_gradient, store)
    else:
        stats = _FrozenHead.apply(hidden, weight, bias, targets, settings)
    return stats


# --- the three ways --------------------------------------------------------------------------------------------------


class _FrozenHead(Function):
    """Stores ∂log-prob/∂hidden and ∂entropy/∂hidden of each token, both [T, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: HeadSettings
    ) -> Tensor:
        matrix = weight.to(settings.dtype)
        stats, directions = _new_stats(hidden), torch.empty_like(hidden)
        entropy_directions = torch.empty_like(hidden) if settings.entropy_gradient else None
        for chunk in _chunks(hidden, matrix, bias, targets, settings):
            stats[chunk.rows] = chunk.stats
            if entropy_directions is not None:
                slopes = chunk.logits.add_(chunk.shift[:, None]).mul_(chunk.probs)
                entropy_directions[chunk.rows] = (slopes.to(matrix.dtype) @ matrix).mul_(-1 / settings.temperature)
            slopes = chunk.probs.scatter_add_(1, chunk.targets[:, None], -torch.ones_like(chunk.top)[:, None])
            directions[chunk.rows] = (slopes.to(matrix.dtype) @ matrix).mul_(-1 / settings.temperature)
        ctx.save_for_backward(directions, entropy_directions)
        return stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        directions, entropy_directions = ctx.saved_tensors
        grad = grads[0].to(directions.dtype)
        grad_hidden = directions * grad[:, LOGPROB, None]
        if entropy_directions is not None:
            grad_hidden.addcmul_(entropy_directions, grad[:, ENTROPY, None])
        return grad_hidden, None, None, None, None


class _TokenWise(Function):
    """Computes the gradients of hidden states and head in the forward pass, from the predicted loss gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
        loss_gradient: LossGradient,
        store: Tensor | None,
    ) -> Tensor:
        matrix = weight.to(settings.dtype)
        stats, grad_hidden = _new_stats(hidden), torch.empty_like(hidden)
        foreseen = torch.zeros_like(stats)
        sums = torch.zeros_like(weight, dtype=stats.dtype) if store is None else store
        bias_sums = None if bias is None else torch.zeros_like(bias, dtype=stats.dtype)
        for chunk in _chunks(hidden, matrix, bias, targets, settings):
            stats[chunk.rows] = chunk.stats
            grads = loss_gradient(stats)[chunk.rows].to(stats.dtype)
            foreseen[chunk.rows] = grads
            one = torch.ones_like(chunk.top)
            shift = chunk.shift if settings.entropy_gradient else None
            slopes = _slopes(chunk.logits, chunk.probs, one, chunk.targets, grads, shift)
            factor = _row_factor(grads, one, settings)
            grad_hidden[chunk.rows] = (slopes.to(matrix.dtype) @ matrix).mul_(factor[:, None])
            _add_product(sums, slopes.t(), (hidden[chunk.rows] * factor[:, None]).to(matrix.dtype))
            if bias_sums is not None:
                bias_sums.addmv_(slopes.t(), factor)
        ctx.save_for_backward(foreseen, grad_hidden)
        ctx.sums = sums.to(weight.dtype) if store is None else None
        ctx.bias_sums = None if bias is None or bias_sums is None else bias_sums.to(bias.dtype)
        ctx.columns = ENTROPY + 1 if settings.entropy_gradient else LOGPROB + 1
        return stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        foreseen, grad_hidden = ctx.saved_tensors
        came, foreseen = grads[0][:, : ctx.columns], foreseen[:, : ctx.columns]
        if _differ(came, foreseen):
            raise RuntimeError(
                "the loss says that it is token-wise, but the gradient of a token's log-prob is not the one foreseen "
                "from that token alone: set `token_wise` to False if the loss, its KL estimate or its average looks at "
                "other tokens, and do not scale the loss before `backward`"
            )
        # Without a second owner, autograd makes the sum the weight's `.grad` as it is instead of copying it.
        sums, ctx.sums = ctx.sums, None
        return grad_hidden, sums, ctx.bias_sums, None, None, None, None


class _Recomputed(Function):
    """Stores the maximum and the sum of exponentials of each token's logits, and computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
        store: Tensor | None,
    ) -> Tensor:
        stats = _new_stats(hidden)
        top, log_total = torch.empty_like(stats[:, 0]), torch.empty_like(stats[:, 0])
        for chunk in _chunks(hidden, weight.to(settings.dtype), bias, targets, settings):
            stats[chunk.rows], top[chunk.rows], log_total[chunk.rows] = chunk.stats, chunk.top, chunk.log_total
        ctx.save_for_backward(hidden, weight, bias, targets, top, log_total, stats)
        ctx.settings, ctx.store = settings, store
        return stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, top, log_total, stats = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        sums = torch.empty_like(weight) if ctx.store is None else ctx.store
        bias_sums = None if bias is None else torch.empty_like(bias)
        total = log_total.exp()
        factor = _row_factor(grads[0], total, settings)
        rows, scaled = hidden.to(settings.dtype), (hidden * factor[:, None]).to(settings.dtype)
        grad_hidden = torch.zeros_like(hidden, dtype=stats.dtype)
        size = max(1, CHUNK_BYTES // (stats.element_size() * max(1, len(hidden))))
        buffer = stats.new_empty(len(hidden) * min(size, len(weight)))
        for start in range(0, len(weight), size):
            columns = slice(start, min(start + size, len(weight)))
            block = weight[columns].to(settings.dtype)
            logits = _logits(rows, block, None if bias is None else bias[columns], settings, buffer).sub_(top[:, None])
            if settings.entropy_gradient:
                mass, shift = logits.exp(), stats[:, ENTROPY] - log_total
                logits.clamp_(min=LOGIT_FLOOR)
            else:
                mass, shift = logits.exp_(), None
            slopes = _slopes(logits, mass, total, targets - start, grads[0], shift)
            _add_product(grad_hidden, slopes, block)
            _add_product(sums[columns], slopes.t(), scaled, keep=ctx.store is not None)
            if bias_sums is not None:
                bias_sums[columns] = slopes.t() @ factor
        grad_hidden.mul_(factor[:, None])
        return grad_hidden.to(hidden.dtype), sums if ctx.store is None else None, bias_sums, None, None, None, None


# --- pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunk:
    """C tokens with the whole vocabulary. The next chunk overwrites `logits` and `probs`, so they may be modified."""

    rows: slice
    targets: Tensor  # [C]
    logits: Tensor  # [C, V], less the row's maximum
    probs: Tensor  # [C, V]
    top: Tensor  # [C], the maximum
    log_total: Tensor  # [C], log Σ exp(logits)
    stats: Tensor  # [C, 3]

    @property
    def shift(self) -> Tensor:
        return self.stats[:, ENTROPY] - self.log_total


def _chunks(
    hidden: Tensor, matrix: Tensor, bias: Tensor | None, targets: Tensor, settings: HeadSettings
) -> Iterator[_Chunk]:
    """Compute statistics chunk by chunk; a chunk's number of tokens depends on the vocabulary alone."""
    dtype = _precise(hidden.dtype)
    size = max(1, CHUNK_BYTES // (dtype.itemsize * len(matrix)))
    buffer, other = hidden.new_empty(2, min(size, len(hidden)) * len(matrix), dtype=dtype)
    for start in range(0, len(hidden), size):
        rows = slice(start, min(start + size, len(hidden)))
        logits = _logits(hidden[rows].to(matrix.dtype), matrix, bias, settings, buffer)
        top = logits.amax(-1)
        probs = torch.softmax(logits.sub_(top[:, None]), -1, out=other[: logits.numel()].view(logits.shape))
        log_total = -probs.amax(-1).log()  # the largest probability is 1 / Σ exp(logits − top)
        stats = _new_stats(hidden[rows])
        stats[:, LOGPROB] = logits.gather(-1, targets[rows, None]).squeeze(-1) - log_total
        stats[:, ENTROPY] = log_total - _dots(probs, logits.clamp_(min=LOGIT_FLOOR))
        if settings.squared_probs:
            stats[:, SQUARED_PROBS] = _dots(probs, probs)
        yield _Chunk(rows, targets[rows], logits, probs, top, log_total, stats)


def _logits(hidden: Tensor, matrix: Tensor, bias: Tensor | None, settings: HeadSettings, buffer: Tensor) -> Tensor:
    """(hidden · matrixᵀ + bias) / temperature in the flat `buffer`; half precision is rounded once, as in a head."""
    logits = buffer[: len(hidden) * len(matrix)].view(len(hidden), len(matrix))
    if logits.dtype == matrix.dtype:
        torch.mm(hidden, matrix.t(), out=logits)
    else:
        logits.copy_(hidden @ matrix.t())
    if bias is not None:
        logits.add_(bias)
    return logits if settings.temperature == 1.0 else logits.div_(settings.temperature)


def _slopes(
    logits: Tensor, mass: Tensor, total: Tensor, targets: Tensor, grads: Tensor, shift: Tensor | None
) -> Tensor:
    """Compute −∂loss/∂logits [M, W] in `mass`, which is p times `total` [M], up to `_row_factor`.

    `targets` [M] outside the W columns belong to other blocks. `shift` [M] adds the entropies' gradient and overwrites
    `logits`.
    """
    peak = total
    if shift is not None:
        mass.mul_(logits.add_(shift[:, None]).mul_(grads[:, ENTROPY, None]).add_(grads[:, LOGPROB, None]))
        peak = total * grads[:, LOGPROB]
    here = (targets >= 0) & (targets < mass.shape[1])
    return mass.scatter_add_(1, torch.where(here, targets, 0)[:, None], torch.where(here, -peak, 0.0)[:, None])


def _row_factor(grads: Tensor, total: Tensor, settings: HeadSettings) -> Tensor:
    grad = 1.0 if settings.entropy_gradient else grads[:, LOGPROB]
    return -grad / (total * settings.temperature)


def _differ(came: Tensor, foreseen: Tensor) -> bool:
    """Whether gradients differ by more than rounding. NaN equals NaN: the learner skips such steps."""
    if not foreseen.numel():
        return False
    size = foreseen.abs()
    largest = torch.where(size.isfinite(), size, 0.0).max()
    differ = (came - foreseen).abs() > 1e-3 * size + 1e-6 * largest
    return bool((differ | (came.isnan() != foreseen.isnan())).any())


def _add_product(out: Tensor, left: Tensor, right: Tensor, *, keep: bool = True) -> None:
    """out += left · right, or out = left · right without `keep`, in the precision of `right`."""
    if out.dtype == left.dtype == right.dtype:
        out.addmm_(left, right, beta=1 if keep else 0)
        return
    size = max(1, CHUNK_BYTES // (2 * out.element_size() * out.shape[1]))
    for part, rows in zip(out.split(size), left.split(size), strict=True):
        product = rows.to(right.dtype) @ right
        part.add_(product) if keep else part.copy_(product)


def _dots(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left[:, None], right[:, :, None]).flatten()


def _new_stats(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(len(hidden), 3, dtype=_precise(hidden.dtype))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
