"""A model called for statistics of trained tokens (log-prob, entropy, squared probabilities) instead of logits.

During the forward pass the LM head is patched to return statistics. Prompt positions are dropped before it, and the
head's own hooks and FSDP2's gathering of its weights work as usual.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from r1_core import kl
from r1_core.learner import linear_head
from r1_core.learner.experts import Routing
from r1_core.learner.linear_head import HeadSettings, LossGradient
from r1_core.learner.logprobs import token_logprobs
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.pack import cut_shared_row

logger = logging.getLogger(__name__)


class TokenStats(NamedTuple):
    """Statistics of T tokens, each [T], float32 or float64."""

    logprobs: Tensor
    entropy: Tensor  # nats; with a gradient only if asked for
    squared_probs: Tensor  # Σ over the vocabulary of p², without a gradient; 0 unless asked for
    full_kl: Tensor | None  # divergence from another model over the vocabulary, nats; with a gradient; None without


@dataclass(frozen=True, slots=True)
class LazyLogits:
    """The logits of T tokens, computed when needed, some tokens at a time: `head(hidden[rows])`."""

    hidden: Tensor  # [T, H]
    head: Callable[[Tensor], Tensor]  # from [C, H] to [C, V]


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Another model's distributions of T tokens, and how to compare with them."""

    logits: LazyLogits
    divergence: Callable[[Tensor, Tensor], Tensor] = kl.full  # of log-distributions [C, V], the other's second

    buffers: ClassVar[int] = 2  # of logits, while a chunk is measured

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return (self.logits.hidden,)

    def measure(self, logits: Tensor, temperature: float, rows: Tensor) -> Tensor:
        """Return the divergence [C] of `logits` [C, V] and the other's; `rows` [C, H] are of `columns`.

        If one vocabulary is larger, its last entries are for no token (padded embeddings), and both leave them out.
        """
        with torch.no_grad():
            others = self.logits.head(rows)
        size = min(logits.shape[-1], others.shape[-1])
        both = (each[..., :size].to(logits.dtype) / temperature for each in (logits, others))
        return self.divergence(*(each.log_softmax(-1) for each in both))


@dataclass(frozen=True, slots=True)
class TopComparison:
    """A teacher's most likely tokens at each of T tokens, compared with by `kl.top_forward`."""

    top: Tensor  # [T, k], log-probs
    top_ids: Tensor  # [T, k]

    buffers: ClassVar[int] = 1

    @property
    def columns(self) -> tuple[Tensor, ...]:
        return self.top, self.top_ids

    def measure(self, logits: Tensor, temperature: float, top: Tensor, top_ids: Tensor) -> Tensor:
        """Return the divergence [C] of `logits` [C, V] and the teacher's tokens, which are rows of `columns`."""
        return kl.top_forward((logits / temperature).log_softmax(-1), top, top_ids)


Comparison: TypeAlias = ModelComparison | TopComparison


class TokenModel:
    """Calls a model for `TokenStats`. `context` makes each call's context, e.g. to disable the adapter.

    With `replays`, the routers of a mixture of experts (`model.routing`, see `Learner`) choose the experts that a batch
    brings, and in passes with a gradient those of the trained tokens are counted.

    `linear_head` computes a linear head. Any other head (LoRA, a module of your own) runs in chunks of tokens, which
    the backward pass computes again. Models without `get_output_embeddings()`, and those that change the logits after
    the head (Gemma 2, Granite, Cohere), which is detected, are called for all logits.
    """

    def __init__(
        self,
        model: nn.Module,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        replays: bool = False,
    ) -> None:
        self.model, self._context, self._replays = model, context, replays
        self._head_is_last: bool | None = None  # None: unknown before the first pass

    @property
    def seen(self) -> bool:
        return self._head_is_last is not None or self._head() is None

    def __call__(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        squared_probs: bool = False,
        loss_gradient: LossGradient | None = None,
        other: Comparison | None = None,
    ) -> TokenStats:
        """Compute the statistics of the batch's trained tokens; ranks that share a row receive those of all.

        With gradients, the caller must call `backward`: the head's gradient may be added to its weight's `.grad`
        directly. Raises ValueError unless the temperature is above 0.

        Args:
            loss_gradient: for a token-wise loss (see `linear_head`); called with this rank's tokens.
            other: another model's distributions of the same tokens, to compare with.
        """
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
        settings = HeadSettings(torch.float32, temperature, entropy_gradient, squared_probs)
        head, stats = self._head(), None
        if head is not None:
            if other is None and _is_linear(head):
                # The first pass may have to be repeated, so it must leave no gradient behind.
                foreseen = loss_gradient if self._head_is_last else None
                compute = partial(_linear, head, targets=batch.targets, settings=settings, loss_gradient=foreseen)
            else:
                compute = partial(_chunked, head.forward, targets=batch.targets, settings=settings, other=other)
            stats = self._from_head(head, batch, compute)
        if stats is None:
            others = () if other is None else other.columns
            stats = _stats_of(self._logits(batch), batch.targets, settings, other, *others)
        logprobs, entropy, squares, *full_kl = batch.gather(stats).unbind(-1)
        entropy = entropy if entropy_gradient else entropy.detach()
        return TokenStats(logprobs, entropy, squares.detach(), full_kl[0] if full_kl else None)

    @torch.no_grad()
    def lazy_logits(self, batch: MicroBatch) -> LazyLogits:
        """Run the model up to its head; if it cannot be used alone, `hidden` holds logits and `head` is the identity.

        Under FSDP2 the head stays gathered with the model's root until `parallel.reshard`.
        """
        head = self._head()
        if head is not None:
            forward = head.forward
            hidden = self._from_head(head, batch, lambda hidden: hidden)

            def logits(rows: Tensor) -> Tensor:
                with self._context():
                    found: Tensor = forward(rows)
                return found

            if hidden is not None:
                return LazyLogits(hidden, logits)
        return LazyLogits(self._logits(batch), lambda logits: logits)

    @torch.no_grad()
    def top(self, batch: MicroBatch, count: int, temperature: float) -> Tensor:
        """Return log-probs of trained tokens, those of the k = `count` most likely ones and their ids, [T, 1 + 2k].

        With a smaller vocabulary the rest is −inf and −1. The ids are exact up to 2²⁴.
        """
        lazy = self.lazy_logits(batch)
        vocabulary = lazy.head(lazy.hidden[:1]).shape[-1]
        kept = min(count, vocabulary)
        size = max(1, linear_head.CHUNK_BYTES // (4 * vocabulary))
        found = []
        for hidden, targets in zip(lazy.hidden.split(size), batch.targets.split(size), strict=True):
            logits = lazy.head(hidden)
            precise = torch.promote_types(logits.dtype, torch.float32)
            logprobs = (logits.to(precise) / temperature).log_softmax(-1)
            top, ids = logprobs.topk(kept)
            own = logprobs.gather(-1, targets[:, None])
            missing = own.new_ones(len(own), count - kept)
            found.append(torch.cat([own, top, -torch.inf * missing, ids.to(precise), -missing], dim=-1))
        return batch.gather(torch.cat(found))

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Return the head's own outputs at the trained tokens, [T, outputs]; a linear head's in float32 or float64.

        Changes that the model makes to logits after the head (Cohere, Gemma 2) are left out: they are not meant for a
        value.
        """
        head = self._head()
        if head is None:
            return batch.gather(self._logits(batch))
        compute = partial(_wide, head) if _is_linear(head) else head.forward
        given: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            given.append(compute(hidden.flatten(0, -2)[batch.predictors]))
            return given[-1][None].clone()  # the model may write into it

        with _replaced(head, forward):
            logits = self._call(batch)
        if len(given) != 1:
            name = type(self.model).__name__
            raise ValueError(f"{name} calls its head {len(given)} times in a forward pass; a critic needs it once")
        # FSDP2 waits for a gradient of the model's output, so add one that is 0.
        return batch.gather(given[0] + 0.0 * logits.sum() if logits.requires_grad else given[0])

    def _head(self) -> nn.Module | None:
        find = getattr(self.model, "get_output_embeddings", None)
        head: nn.Module | None = None if find is None or self._head_is_last is False else find()
        return head

    def _from_head(self, head: nn.Module, batch: MicroBatch, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return what `compute` makes of the hidden states [T, H] inside the head; None if the model changed it."""
        outputs: list[tuple[Tensor, int]] = []

        def forward(hidden: Tensor) -> Tensor:
            result = compute(hidden.flatten(0, -2)[batch.predictors])[None]
            if result.requires_grad:
                result = result.clone()  # FSDP2 warns about views, whose hook an in-place write would lose
            outputs.append((result, result._version))
            return result

        try:
            with _replaced(head, forward):
                logits = self._call(batch)
        except IndexError:  # of a model that masks some of the logits (Chameleon)
            if not outputs:
                raise
            logits = outputs[0][0].clone()
        # The statistics are the model's output, because FSDP2 waits for the gradient of its output.
        self._head_is_last = len(outputs) == 1 and logits is outputs[0][0] and logits._version == outputs[0][1]
        if self._head_is_last:
            return logits[0]
        logger.warning(
            "%s changes the logits after its head, so its log-probs are computed from all logits at once",
            type(self.model).__name__,
        )
        return None

    def _logits(self, batch: MicroBatch) -> Tensor:
        if batch.pack is not None:
            logits = self._call(batch, logits_to_keep=batch.predictors)[0]
            return logits if len(logits) == len(batch.predictors) else logits[batch.predictors]  # some return all
        # Rows need different positions, which `logits_to_keep` cannot express.
        return self._call(batch).flatten(0, 1)[batch.predictors]

    def _call(self, batch: MicroBatch, **more: Tensor) -> Tensor:
        pack = batch.pack
        cuts = pack is not None and pack.sequence is not None
        extra = {"pack": pack} if pack is not None and getattr(self.model, "reads_pack", False) else {}
        if pack is not None and (pack.shared or cuts) and not extra:
            kind = "ranks cannot share its rows" if cuts else "its samples cannot share prompts"
            raise ValueError(f"{type(self.model).__name__} reads no `pack`, so {kind}")
        with self._context(), self._routing(batch), cut_shared_row(self.model) if cuts else nullcontext():
            logits: Tensor = self.model(**batch.forward, **more, **extra, use_cache=False).logits
        return logits

    def take_expert_counts(self) -> Tensor | None:
        """Return which experts passes with a gradient have chosen since the last call; see `experts.Routing`."""
        routing: Routing | None = getattr(self.model, "routing", None)
        return None if routing is None else routing.take_counts()

    def _routing(self, batch: MicroBatch) -> AbstractContextManager[object]:
        routing: Routing | None = getattr(self.model, "routing", None) if self._replays else None
        if routing is not None:
            return routing.replaying(batch.routed, batch.predictors if torch.is_grad_enabled() else None)
        if batch.routed is not None and self._replays:
            raise ValueError(f"samples have routed_experts, and {type(self.model).__name__} cannot replay them")
        return nullcontext()


def _wide(head: nn.Linear, hidden: Tensor) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    bias = None if head.bias is None else head.bias.to(dtype)
    return nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)


def _linear(
    head: nn.Linear, hidden: Tensor, targets: Tensor, settings: HeadSettings, loss_gradient: LossGradient | None
) -> Tensor:
    weight, bias = head.weight, head.bias
    # An existing gradient accumulates in place. FSDP2 has none: it removes that of each backward pass.
    plain = weight.is_leaf and not weight._backward_hooks and not weight._post_accumulate_grad_hooks
    store = weight.grad if torch.is_grad_enabled() and plain else None
    settings = replace(settings, dtype=weight.dtype)
    return linear_head.token_stats(hidden, weight, bias, targets, settings, loss_gradient=loss_gradient, store=store)


def _chunked(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    settings: HeadSettings,
    other: Comparison | None = None,
) -> Tensor:
    """Statistics [T, 3] under any head, or [T, 4] with another model; holds one chunk's logits at a time."""

    def measure(rows: Tensor, chosen: Tensor, *others: Tensor) -> Tensor:
        return _stats_of(head(rows), chosen, settings, other, *others)

    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    columns = (hidden, targets) if other is None else (hidden, targets, *other.columns)
    size = max(1, linear_head.CHUNK_BYTES // (4 * vocabulary * (1 if other is None else other.buffers)))
    chunks = zip(*(column.split(size) for column in columns), strict=True)
    return torch.cat([checkpoint(measure, *chunk, use_reentrant=False) for chunk in chunks])


def _stats_of(
    logits: Tensor,
    targets: Tensor,
    settings: HeadSettings,
    other: Comparison | None = None,
    *others: Tensor,
) -> Tensor:
    """Statistics [T, 3] of targets [T] under logits [T, V]; [T, 4] with the rows of another's `columns`."""
    logprobs, entropy = token_logprobs(
        logits, targets, settings.temperature, with_entropy=True, entropy_gradient=settings.entropy_gradient
    )
    squares = torch.zeros_like(logprobs)
    if settings.squared_probs:
        with torch.no_grad():
            squares = (logits.to(logprobs.dtype) / settings.temperature).softmax(-1).square().sum(-1)
    assert entropy is not None
    stats = [logprobs, entropy, squares]
    if other is not None:
        stats.append(other.measure(logits.to(logprobs.dtype), settings.temperature, *others))
    return torch.stack(stats, dim=-1)


def _is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
