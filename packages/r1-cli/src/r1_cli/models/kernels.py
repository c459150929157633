"""Attention over all pieces of a packed row in one torch GPU kernel.

Half precision uses FlashAttention (arXiv 2205.14135), `torch.nn.attention.varlen`. Other dtypes, older GPUs and other
head sizes use the memory-efficient kernel (arXiv 2112.05682), which has no windows.

NOT RUN ON A GPU: tested with stand-ins of the kernels' signatures.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from r1_cli.hardware import generation

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # that FlashAttention takes
EVERYTHING, CAUSAL = (-1, -1), (-1, 0)  # windows
UNMASKED, UP_TO_THE_LAST = 0, 2  # `custom_mask_type`; with the second a piece's last query stands at its last key

_efficient = torch.ops.aten._efficient_attention_forward


class Pieces(NamedTuple):
    """The ends of a row's pieces. Each piece's last query is at its last key."""

    ends: Tensor  # int32 [pieces + 1]
    longest: int  # queries of a piece
    key_ends: Tensor  # int32 [pieces + 1]
    most_keys: int  # of a piece


# Of query [1, heads, T, size], key and value [1, key heads, K, size], pieces, scale (None: 1 / √size) and window it
# makes [1, T, heads, size]. Tokens look at keys that stand in `window` before and behind them, −1: however far.
Kernel = Callable[[Tensor, Tensor, Tensor, Pieces, float | None, tuple[int, int]], Tensor]


def find_kernel(device: torch.device, dtype: torch.dtype, head: int, *, windowed: bool = False) -> Kernel | None:
    """Return the kernel for queries of this kind; None if there is none.

    Args:
        head: size of a head.
        windowed: it must support windows other than `EVERYTHING` and `CAUSAL`.
    """
    if device.type != "cuda":
        return None
    if dtype in HALF and head % 8 == 0 and 0 < head <= LARGEST_HEAD and generation(device) >= 8:
        return attend_in_half_precision if not windowed or "window_size" in _known() else None
    return None if windowed or dtype not in (*HALF, torch.float32) else attend_in_any_precision


def attend_in_half_precision(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None, window: tuple[int, int]
) -> Tensor:
    known, options = _known(), dict[str, Any]()
    if "window_size" in known:
        options["window_size"] = window
    else:
        options["is_causal"] = window == CAUSAL
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if key.shape[1] != query.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        key, value = _repeat_heads(query, key, value)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    counts = pieces.ends.int(), pieces.key_ends.int(), pieces.longest, pieces.most_keys
    found: Tensor = cast(Any, varlen_attn)(*rows, *counts, **options)
    return found[None]


def attend_in_any_precision(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float | None, window: tuple[int, int]
) -> Tensor:
    rows = [tensor.transpose(1, 2) for tensor in (query, *_repeat_heads(query, key, value))]
    counts = pieces.ends.int(), pieces.key_ends.int(), pieces.longest, pieces.most_keys
    mask = UP_TO_THE_LAST if window == CAUSAL else UNMASKED
    bias, dropout, sums = None, 0.0, torch.is_grad_enabled()
    found: Tensor = _efficient(*rows, bias, *counts, dropout, mask, sums, scale=scale)[0]
    return found


def _known() -> Mapping[str, Any]:
    return inspect.signature(varlen_attn).parameters


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    times = query.shape[1] // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
