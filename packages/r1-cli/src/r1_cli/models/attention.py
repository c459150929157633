"""Attention over packed rows in which each sequence costs only its own length squared.

Torch's scaled-dot-product attention knows one mask for the whole row: a pack of 64 sequences would compute, and with
the mask store, 64 times what the sequences need. Here all sequences of a row go through one kernel that knows where
they end, `torch.nn.attention.varlen`, or, where there is none (processors, float32), each by itself through torch's.
The pictures of a vision tower, and the windows that it cuts them into, go the same way. The result is the same; every
other call goes to torch's attention unchanged. Ranks that share a row exchange its heads for its tokens before, and
back after.

NOT RUN ON A GPU: the kernel's calls are tested with a stand-in of its signature.
"""

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from r1_cli.hardware import generation
from r1_cli.models.shared_prompts import attend_to_prompts
from r1_core.learner.decoder import cut_shared_rows
from r1_core.learner.pack import NOTHING, Keys, Pack

PACKED_ATTENTION = "r1_packed"
# Hugging Face tells towers where pictures end if "flash" is in the name, and else loops over them by itself.
VISION_ATTENTION = "r1_packed_flash"
HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # that the kernel takes


def attend_packed(model: PreTrainedModel) -> None:
    """Let a model attend by what is here, and, if its layers hand arguments on, be told where sequences end.

    Then ranks may share its rows, too.
    """
    vision = getattr(model.config, "vision_config", None)
    tower = model.get_encoder(modality="image") if vision is not None else model
    cuts = any("cu_seqlens" in inspect.signature(module.forward).parameters for module in tower.modules())
    chosen = dict.fromkeys(("", *model.config.sub_configs), PACKED_ATTENTION)
    if vision is not None and cuts and tower is not model:
        chosen["vision_config"] = VISION_ATTENTION
    model.set_attn_implementation(chosen)
    model.reads_pack = bool(model._supports_attention_backend)  # what `r1_core.learner.token_model` asks for
    cut_shared_rows(model)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    pack: Pack | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as a text layer does, within each sequence of a packed row.

    Args:
        query: [1, heads, T, head size]; key and value [1, key heads, T, head size]. T counts the own part if ranks
            share the row (`pack.sequence`).
        attention_mask: None for a packed row; padded batches come with one, and windows that no kernel knows.
        position_ids: int64 [1, T], 0 at the start of each sequence; None in vision towers, which cut by themselves.
        pack: which token of a row of T attends to which; without it the first layer asks the positions where each
            sequence begins, and waits for the device.
        sliding_window: how many tokens back a token looks, itself included; None: all.

    Returns:
        [1, T, heads, head size] and None for the attention weights.
    """
    if attention_mask is not None or position_ids is None or position_ids.numel() != query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if pack is None:
        pack = _find_pack(position_ids, _starts)
    if pack.sequence is None:
        return _attend_within(module, query, key, value, pack, sliding_window, kwargs), None
    key, value = (pack.sequence.repeat_heads(tensor) for tensor in (key, value))
    query, key, value = (pack.sequence.gather_tokens(tensor) for tensor in (query, key, value))
    share = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1])
    found = _attend_within(share, query, key, value, pack, sliding_window, kwargs)
    return pack.sequence.gather_heads(found), None


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    pack: Pack | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as a vision tower does, within each picture or window of a row, in both directions.

    Args:
        query, key, value: [1, heads, T, head size].
        attention_mask: handed on; towers that cut give none.
        cu_seq_lens_q: int32 [pieces + 1], where each piece begins and the last one ends.
        max_length_q: tokens of the longest piece.
        pack: the text's cut, of no use here.

    Returns:
        [1, T, heads, head size] and None for the attention weights.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in ("cu_seq_lens_k", "max_length_k")}
    if cu_seq_lens_q is None or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if _has_kernel(query) and max_length_q is not None:
        scale = kwargs.get("scaling")
        return _attend_at_once(query, key, value, cu_seq_lens_q, max_length_q, scale, (-1, -1)), None
    lengths = _find_pack(cu_seq_lens_q, methodcaller("tolist")).lengths
    return _attend_by_pieces(module, query, key, value, lengths, kwargs), None


# --- the two ways ----------------------------------------------------------------------------------------------------


def _has_kernel(query: Tensor) -> bool:
    """Whether the kernel takes these queries."""
    return _has_kernel_for(query.device, query.dtype, query.shape[-1])


def _has_kernel_for(device: torch.device, dtype: torch.dtype, head: int) -> bool:
    """Whether it takes heads of this size: in half precision, on a GPU that is of 2020 or later."""
    if device.type != "cuda" or dtype not in HALF or head % 8 or not 0 < head <= LARGEST_HEAD:
        return False
    return generation(device) >= 8


def _known() -> Mapping[str, Any]:
    """What the kernel can be told, which differs between versions of torch."""
    return inspect.signature(varlen_attn).parameters


def _attend_within(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    sliding_window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Attend as `pack` says in a whole row; return [1, T, heads, head size]."""
    scale = options.get("scaling")
    if _has_kernel(query):
        window = -1 if sliding_window is None else sliding_window - 1
        keys = pack.keys if pack.shared else None
        return _attend_at_once(query, key, value, pack.ends, pack.longest, scale, (window, 0), keys)
    if not pack.shared:
        return _attend_by_pieces(module, query, key, value, pack.lengths, options)
    plain = not options.get("dropout") and options.get("position_bias") is None and key.shape == value.shape
    if plain and query.device.type == "cpu":
        return attend_to_prompts(query, key, value, pack, scale)
    return _attend_by_runs(module, query, key, value, pack, options)


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
    keys: Keys | None = None,
) -> Tensor:
    """Give the kernel pieces of a row [1, heads, T, head size], which end at `ends` [pieces + 1].

    Tokens look at those of their piece, or of its `keys`, whose last is the piece's last token, that stand in `window`
    before and behind them, −1: however far. Returns [1, T, heads, head size].
    """
    key_ends, most_keys = ends, longest
    if keys is not None:
        key, value = (each.index_select(2, keys.places) for each in (key, value))
        key_ends, most_keys = keys.ends, keys.longest
    known, options = _known(), dict[str, Any]()
    if "window_size" in known:
        options["window_size"] = window
    else:
        options["is_causal"] = window == (-1, 0)
    if "scale" in known:
        options["scale"] = scale
    elif scale is not None:
        query = query * (scale * query.shape[-1] ** 0.5)
    if key.shape[1] != query.shape[1] and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif key.shape[1] != query.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    found: Tensor = cast(Any, varlen_attn)(*rows, ends.int(), key_ends.int(), longest, most_keys, **options)
    return found[None]


def _attend_by_pieces(
    module: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], options: dict[str, Any]
) -> Tensor:
    """Attend piece after piece; return [1, T, heads, head size]."""
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *piece, None, **options)[0] for piece in pieces], dim=1)


def _attend_by_runs(
    module: Any, query: Tensor, key: Tensor, value: Tensor, pack: Pack, options: dict[str, Any]
) -> Tensor:
    """Attend run after run, each to its keys; return [1, T, heads, head size]."""
    starts, found = [*pack.starts, query.shape[2]], list[Tensor]()
    for (start, end), behind in zip(pairwise(starts), pack.behind, strict=True):
        own = slice(start, end)
        seen, mask = [own], None
        if behind != NOTHING:
            seen.insert(0, slice(starts[behind], starts[behind + 1]))
            before = starts[behind + 1] - starts[behind]
            mask = torch.ones(end - start, before + end - start, dtype=torch.bool, device=query.device).tril(before)
        keys, values = (torch.cat([each[:, :, part] for part in seen], 2) for each in (key, value))
        found.append(sdpa_attention_forward(module, query[:, :, own], keys, values, mask, **options)[0])
    return torch.cat(found, 1)


# --- where pieces end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor that says where pieces end, and what it said."""

    tensor: ReferenceType[Tensor]
    version: int  # another one if somebody has written into it since
    pack: Pack


_last: deque[_Seen] = deque(maxlen=4)  # a tower has two: pictures, and the windows in them


def _find_pack(tensor: Tensor, read_bounds: Callable[[Tensor], list[int]]) -> Pack:
    """Return the pieces of which `read_bounds` reads the beginnings, and the last one's end, off a tensor.

    To know them the host has to wait for the device, which then runs dry. All layers of a forward pass are given the
    same tensor, so only the first one waits.
    """
    for seen in _last:
        if seen.tensor() is tensor and seen.version == tensor._version:
            return seen.pack
    pack = Pack.of([end - start for start, end in pairwise(read_bounds(tensor))], tensor.device)
    _last.append(_Seen(ref(tensor), tensor._version, pack))
    return pack


def _starts(position_ids: Tensor) -> list[int]:
    """Where positions begin again at 0, and how many there are."""
    starts: list[int] = (position_ids.flatten() == 0).cpu().nonzero().flatten().tolist()
    return [*starts, position_ids.numel()]


# --- masks -----------------------------------------------------------------------------------------------------------


def packed_mask(*args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> Any:
    """Return no mask where `packed_attention` needs none, and torch's where there is padding or a window.

    In one row the kernel knows windows by itself, if they are those that layers are told of.
    """
    if attention_mask is None and (local_size is None or _kernel_knows(local_size, **kwargs)):
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)


def _kernel_knows(window: int, *, batch_size: int, config: Any, device: Any, dtype: torch.dtype, **_: Any) -> bool:
    told = getattr(config, "sliding_window", None) == window and "window_size" in _known()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return told and batch_size == 1 and _has_kernel_for(torch.device(device), dtype, head)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(VISION_ATTENTION, vision_attention)
for _name in (PACKED_ATTENTION, VISION_ATTENTION):
    AttentionMaskInterface.register(_name, packed_mask)
