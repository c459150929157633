"""Keys and values of the samples that are running, written in place, and the attention that reads them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "r1_rollout_decode"


class RowCache(Cache):
    """One row per running sample: the prompt's keys and values first, the answer's behind them.

    Rows have their own lengths, so samples of different prompts and ages decode together, and a row can be replaced
    without touching the others. Columns past a row's length hold leftovers and must be masked.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        self._rows, self._columns, self._width = rows, columns, 0
        self._keys: list[Tensor] = []  # per layer [rows, heads, columns, head size]
        self._values: list[Tensor] = []
        self._target: tuple[Tensor, Tensor] | None = None

    def insert(self, prompts: DynamicCache, lengths: Sequence[int], first_row: int, copies: int) -> None:
        """Give each prefilled prompt `copies` rows, one prompt after the other from `first_row` on.

        Args:
            prompts: keys and values [prompts, heads, padded length, head size] in each layer, padded on the right.
            lengths: each prompt's own length.
        """
        if not self._keys:
            self._keys = [self._allocate(layer.keys) for layer in prompts.layers]
            self._values = [self._allocate(layer.values) for layer in prompts.layers]
        for layer, keys, values in zip(prompts.layers, self._keys, self._values, strict=True):
            for index, length in enumerate(lengths):
                rows = slice(first_row + index * copies, first_row + (index + 1) * copies)
                keys[rows, :, :length] = layer.keys[index, :, :length]
                values[rows, :, :length] = layer.values[index, :, :length]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, because a masked column still meets the softmax's zero weight, and 0 × NaN is NaN.
        return like.new_zeros(self._rows, like.shape[1], self._columns, like.shape[3])

    def aim(self, lengths: Tensor, width: int) -> None:
        """Say where the next forward writes: row i at column `lengths[i]`, and that it reads `width` columns."""
        self._target = (torch.arange(len(lengths), device=lengths.device), lengths)
        self._width = width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values [rows, heads, 1, head size]; return all columns of these rows."""
        assert self._target is not None, "aim() comes before the forward"
        rows, columns = self._target
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[rows, :, columns] = key_states[:, :, 0]
        values[rows, :, columns] = value_states[:, :, 0]
        return keys[: len(rows), :, : self._width], values[: len(rows), :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns in use before the next token."""
        return max(self._width - 1, 0)

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy the first `width` columns of rows over other rows, to close the gaps that finished samples leave."""
        for tensor in (*self._keys, *self._values):
            tensor[list(targets), :, :width] = tensor[list(sources), :, :width]


def decode_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend with one query token per row, without a copy of keys and values for every query head.

    Query heads that share a key head (arXiv 2305.13245) stand in the query's length axis instead. Any other call,
    prompts and vision towers, is torch's own attention.

    Args:
        query: [rows, heads, 1, head size].
        key, value: [rows, key heads, columns, head size].
        attention_mask: bool [rows, 1, 1, columns].

    Returns:
        [rows, 1, heads, head size] and None for the attention weights.
    """
    rows, heads, length, size = query.shape
    if length != 1 or attention_mask is None:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(rows, 1, heads, size), None


AttentionInterface.register(ATTENTION, decode_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
