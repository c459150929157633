"""Attention over packed rows in which each sequence costs only its own length squared.

Torch's scaled-dot-product attention knows one mask for the whole row: a pack of 64 sequences would compute, and with
the mask store, 64 times what the sequences need. Here a packed row is cut where its positions start again at 0 and each
piece attends to itself. The result is the same; every other call goes to torch's attention unchanged.
"""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "r1_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row.

    Args:
        query: [1, heads, T, head size]; key and value [1, key heads, T, head size].
        attention_mask: None for a packed row; padded batches and windows come with one.
        position_ids: int64 [1, T], 0 at the start of each sequence; None in vision towers, which cut by themselves.

    Returns:
        [1, T, heads, head size] and None for the attention weights.
    """
    if attention_mask is not None or position_ids is None or position_ids.numel() != query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    lengths = _lengths(position_ids)
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *piece, None, **kwargs)[0] for piece in pieces], dim=1), None


@dataclass(frozen=True, slots=True)
class _Seen:
    """The positions that were cut last, and how."""

    positions: ReferenceType[Tensor]
    version: int  # another one if somebody has written into them since
    lengths: list[int]


_last: _Seen | None = None


def _lengths(position_ids: Tensor) -> list[int]:
    """Return how long the sequences of a packed row are.

    To know it the host has to wait for the device, which then runs dry. All layers of a forward pass are given the same
    tensor, so only the first one waits.
    """
    global _last
    seen = _last
    if seen is not None and seen.positions() is position_ids and seen.version == position_ids._version:
        return seen.lengths
    starts = (position_ids.flatten() == 0).cpu().nonzero().flatten().tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], position_ids.numel()], strict=True)]
    _last = _Seen(ref(position_ids), position_ids._version, lengths)
    return lengths


def packed_mask(*args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return no mask where `packed_attention` needs none, and torch's where there is padding or a sliding window."""
    if attention_mask is None and local_size is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, packed_mask)
