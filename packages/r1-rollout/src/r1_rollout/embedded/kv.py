"""Keys and values of the samples that are running, and the attention that reads them.

A prompt's keys and values are kept once and read by all its samples, whose own tokens are kept apart. The two softmaxes
are then merged by their maxima and sums, which is exact (FlashAttention, arXiv 2205.14135).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "r1_rollout_decode"
_FIRST_COLUMNS = 64  # answer tokens there is room for at first; doubled when they run out

_decoding: ContextVar["GroupCache | None"] = ContextVar("decoding", default=None)


class _Layer:
    """One layer's keys and values, each [places, heads, columns, size]."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = self.values = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])

    def grow(self, places: int, columns: int) -> None:
        self.keys = _grown(self.keys, places, columns)
        self.values = _grown(self.values, places, columns)

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        self.keys[targets, :, :columns] = self.keys[sources, :, :columns]
        self.values[targets, :, :columns] = self.values[sources, :, :columns]


class GroupCache(Cache):
    """A slot per prompt and a row per running sample.

    Rows have their own lengths, so samples of different prompts and ages decode together, and a row can be replaced
    without touching the others. Columns past a row's length hold leftovers and are masked.
    """

    def __init__(self, rows: int, columns: int, prompt_columns: int) -> None:
        """Make an empty cache.

        Args:
            rows: samples that run together, at most.
            columns: tokens of an answer, at most.
            prompt_columns: tokens of a prompt, at most.
        """
        super().__init__(layers=[])
        self._rows, self._columns, self._prompt_columns = rows, columns, prompt_columns
        self._prompts: list[_Layer] = []
        self._answers: list[_Layer] = []
        self._width = 0
        self.served: Tensor | None = None  # the keys that the last `update` gave out
        self.layer = 0  # and their layer

    def insert(self, prefilled: DynamicCache, first_slot: int) -> None:
        """Copy prefilled prompts [prompts, heads, padded length, size], padded on the right, to slots in a row."""
        count, width = prefilled.layers[0].keys.shape[0], prefilled.layers[0].keys.shape[2]
        if not self._prompts:
            self._prompts = [_Layer(layer.keys) for layer in prefilled.layers]
            self._answers = [_Layer(layer.keys) for layer in prefilled.layers]
        slots = slice(first_slot, first_slot + count)
        for layer, own in zip(prefilled.layers, self._prompts, strict=True):
            if slots.stop > len(own.keys):
                own.grow(max(slots.stop, 2 * len(own.keys)), self._prompt_columns)
            own.keys[slots, :, :width] = layer.keys
            own.values[slots, :, :width] = layer.values

    def arrange(self, slots: Tensor, lengths: Tensor) -> None:
        """Say which prompts the rows belong to.

        Args:
            slots: int64 [rows], the slot of each row's prompt.
            lengths: int64 [slots in use], the length of each prompt.
        """
        order, counts = slots.argsort(stable=True), slots.bincount(minlength=len(lengths))
        ranks = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[slots[order]]
        most = int(counts.max())
        self._places = torch.empty_like(slots)  # [rows]: where a row stands in `members`
        self._places[order] = slots[order] * most + ranks
        self._members = slots.new_zeros(len(lengths) * most)  # [slots × most]: the rows of each slot, then row 0
        self._members[self._places] = torch.arange(len(slots), device=slots.device)
        self._used, self._prompt_width = len(lengths), int(lengths.max())
        self._prompt_bias = _bias(lengths, self._prompt_width)

    def aim(self, ages: Tensor) -> Tensor:
        """Say where the next forward writes, row i at column `ages[i]`; return the rows' mask [rows, 1, 1, columns]."""
        self._target = (torch.arange(len(ages), device=ages.device), ages)
        self._width = int(ages.max()) + 1
        if self._width > self._answers[0].keys.shape[2]:
            columns = min(max(2 * self._width, _FIRST_COLUMNS), self._columns)
            for layer in self._answers:
                layer.grow(self._rows, columns)
        return _bias(ages + 1, self._width)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Let `decode_attention` read this cache inside the block."""
        token = _decoding.set(self)
        try:
            yield
        finally:
            _decoding.reset(token)
            self.served = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [rows, heads, 1, size]; return those of the rows' answers so far."""
        rows, columns = self._target
        own = self._answers[layer_idx]
        own.keys[rows, :, columns] = key_states[:, :, 0]
        own.values[rows, :, columns] = value_states[:, :, 0]
        self.served, self.layer = own.keys[: len(rows), :, : self._width], layer_idx
        return self.served, own.values[: len(rows), :, : self._width]

    def attend_prompts(self, query: Tensor) -> "Partial":
        """Attend to the rows' prompts: one product a prompt, with the queries [rows, heads, queries, size] of a group.

        Returns:
            The rows' part of the attention, not normalised.
        """
        _, heads, queries, size = query.shape
        own = self._prompts[self.layer]
        together = query[self._members].view(self._used, -1, heads, queries, size).transpose(1, 2)
        part = partial_attention(
            together.reshape(self._used, heads, -1, size),
            own.keys[: self._used, :, : self._prompt_width],
            own.values[: self._used, :, : self._prompt_width],
            self._prompt_bias,
        )
        return Partial(*(self._of_rows(tensor, queries) for tensor in part))

    def _of_rows(self, tensor: Tensor, queries: int) -> Tensor:
        """[slots, heads, members × queries, size] to [rows, heads, queries, size]."""
        slots, heads, _, size = tensor.shape
        return tensor.view(slots, heads, -1, queries, size).transpose(1, 2).flatten(0, 1)[self._places]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns in use before the next token."""
        return max(self._width - 1, 0)

    def move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over other rows, to close the gaps that finished samples leave."""
        for layer in self._answers if self._width else ():
            layer.move(sources, targets, self._width)

    def move_slot(self, source: int, target: int) -> None:
        """Copy a prompt over one that has no samples left."""
        for layer in self._prompts:
            layer.move([source], [target], self._prompt_columns)


class Partial(NamedTuple):
    """A softmax over some of the columns, not normalised."""

    output: Tensor  # float32 [batch, heads, queries, size], the values weighted by exp(score - peak)
    peak: Tensor  # float32 [batch, heads, queries, 1], the largest score
    total: Tensor  # float32 [batch, heads, queries, 1], the sum of the weights


def partial_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Partial:
    """Attend to some of the columns.

    Args:
        query: [batch, heads, queries, size], scaled.
        key: [batch, heads, columns, size].
        value: [batch, heads, columns, size].
        bias: float32 [batch, 1, 1, columns], 0 or, where a column is out of sight, -inf.
    """
    scores = (query @ key.transpose(2, 3)).float().add_(bias)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    output = weights.to(value.dtype) @ value
    return Partial(output.float(), peak, weights.sum(dim=-1, keepdim=True))


def merge(first: Partial, second: Partial) -> Tensor:
    """Return the attention over the columns of both."""
    peak = torch.maximum(first.peak, second.peak)
    first_scale, second_scale = (first.peak - peak).exp(), (second.peak - peak).exp()
    output = first.output * first_scale + second.output * second_scale
    return output / (first.total * first_scale + second.total * second_scale)


def _grown(tensor: Tensor, places: int, columns: int) -> Tensor:
    """Return a copy [places, heads, columns, size] of a smaller tensor, zeros behind it."""
    old_places, heads, old_columns, size = tensor.shape
    # Zeros, because a masked column still meets the softmax's zero weight, and 0 × NaN is NaN.
    larger = tensor.new_zeros(places, heads, columns, size)
    larger[:old_places, :, :old_columns] = tensor
    return larger


def _bias(lengths: Tensor, width: int) -> Tensor:
    """Return float32 [batch, 1, 1, width]: 0 in the first `lengths` columns, -inf behind them."""
    hidden = torch.arange(width, device=lengths.device) >= lengths[:, None]
    bias = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)
    return bias[:, None, None]


def decode_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with one query token per row to the row's prompt and answer; elsewhere be torch's own attention.

    Query heads that share a key head (arXiv 2305.13245) are queries of it, so no key is copied.

    Args:
        query: [rows, heads, 1, size].
        key, value: [rows, key heads, columns, size], those of the answers.
        attention_mask: float32 [rows, 1, 1, columns], see `GroupCache.aim`.

    Returns:
        [rows, 1, heads, size] and None for the attention weights.

    Raises:
        RuntimeError: the model caps its scores, which torch's attention cannot; or while decoding, it attends to other
            keys than the cache gave it.
    """
    if kwargs.get("softcap") is not None:
        raise RuntimeError(f"{type(module).__name__} caps its attention scores (softcap)")
    cache = _decoding.get()
    if cache is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    if key is not cache.served or attention_mask is None:
        raise RuntimeError(
            f"{type(module).__name__} does not attend to the keys as its cache gave them: the embedded engine cannot "
            "decode with this model"
        )
    rows, heads, _, size = query.shape
    scaling = kwargs.get("scaling")
    grouped = query.reshape(rows, key.shape[1], -1, size) * (size**-0.5 if scaling is None else scaling)
    output = merge(cache.attend_prompts(grouped), partial_attention(grouped, key, value, attention_mask))
    return output.to(query.dtype).reshape(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
