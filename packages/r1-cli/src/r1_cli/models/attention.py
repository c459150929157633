"""Attention over packed rows in which each sequence costs only its own length squared.

Torch's attention has one mask for the whole row: 64 sequences would cost 64 times as much. A GPU kernel gets the
sequences' bounds (`kernels`); processors attend one sequence at a time, with `shared_prompts` for shared prompts.
Vision towers are computed alike; other calls use torch's attention. Ranks that share a row exchange its heads for its
tokens before, and back after.
"""

import inspect
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, pairwise
from operator import methodcaller
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function, sdpa_mask

from r1_cli.models.families import find_value, is_vision_language
from r1_cli.models.kernels import CAUSAL, EVERYTHING, Kernel, Pieces, find_kernel
from r1_cli.models.recurrent import pack_recurrent_layers
from r1_cli.models.shared_prompts import attend_to_prompts
from r1_core.learner.pack import NO_PROMPT, Pack
from r1_rollout.embedded.scores import attend, read_score_change, retune
from r1_rollout.embedded.windows import AttentionWindow, window_of

PACKED_ATTENTION = "r1_packed"
# Hugging Face passes the pictures' bounds to towers if "flash" is in the name, and otherwise loops over pictures.
VISION_ATTENTION = "r1_packed_flash"


def attend_packed(model: PreTrainedModel) -> None:
    """Set r1's attention in a model, and pass packs to its layers if they accept further arguments.

    Models without a choice of attention (BLOOM, GPT-J) keep their own.
    """
    recurrent = pack_recurrent_layers(model)
    if not model._can_set_attn_implementation():
        model.config._attn_implementation = "eager"
        model.reads_pack = recurrent
        return
    vision = is_vision_language(model.config)
    tower = model.get_encoder(modality="image") if vision else model
    cuts = any("cu_seqlens" in inspect.signature(module.forward).parameters for module in tower.modules())
    chosen = dict.fromkeys(("", *model.config.sub_configs), PACKED_ATTENTION)
    if vision and cuts and tower is not model:
        chosen["vision_config"] = VISION_ATTENTION
    model.set_attn_implementation(chosen)
    model.reads_pack = recurrent or _takes_any(model)  # read by `r1_core.learner.token_model`


def _takes_any(model: PreTrainedModel) -> bool:
    """Whether a model's forward takes further arguments; whether they reach its layers is found by comparison."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return bool(model._supports_attention_backend) or inspect.Parameter.VAR_KEYWORD in kinds


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | RowMask | None",
    *,
    position_ids: Tensor | None = None,
    pack: Pack | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, in a text layer, within each sequence of a packed row.

    Args:
        query: [1, heads, T, head size]; key and value [1, key heads, T, head size]. T is this rank's part of the row.
        attention_mask: None for a packed row, or a `RowMask`; padded batches have one, and windows that layers do not
            pass.
        position_ids: int64 [1, T], 0 at the start of each sequence; None in vision towers.
        pack: the row's segments. Without it the first layer reads them from the positions, which waits for the device.
        sliding_window: how many tokens back a token attends, itself included; None: all.

    Returns:
        [1, T, heads, head size] and None for the attention weights.
    """
    window = window_of(module, {"sliding_window": sliding_window})
    unpadded = attention_mask is None or isinstance(attention_mask, RowMask)
    if unpadded and pack is None and position_ids is not None and position_ids.numel() == query.shape[2]:
        pack = _find_pack(position_ids, _starts)
    if isinstance(attention_mask, RowMask):
        if pack is None or not _belongs(pack, module, query) or pack.sequence is not None:
            raise ValueError(f"{type(module).__name__} attends in both directions, which ranks that share a row cannot")
        return _attend_by_segments(module, query, key, value, pack, window, kwargs, attention_mask), None
    if attention_mask is not None or pack is None or not _belongs(pack, module, query):
        if attention_mask is None and window is not None and window.size < query.shape[2]:
            attention_mask = _mask(query.shape[2], 0, window, query.device)
        return attend(module, query, key, value, attention_mask, kwargs), None
    query = retune(module, query, partial(_places, pack))
    if window is not None and window.chunked:
        pack, window = _cut_chunks(pack, window.size), None
    if pack.sequence is None:
        return _attend_within(module, query, key, value, pack, window, kwargs), None
    key, value = (pack.sequence.repeat_heads(tensor) for tensor in (key, value))
    query, key, value = (pack.sequence.gather_tokens(tensor) for tensor in (query, key, value))
    share = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1])
    if kwargs.get("s_aux") is not None:
        kwargs["s_aux"] = pack.sequence.part(kwargs["s_aux"], 0)
    found = _attend_within(share, query, key, value, pack, window, kwargs)
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
    """Attend, in a vision tower, within each picture or window of a row, in both directions.

    Args:
        query, key, value: [1, heads, T, head size].
        cu_seq_lens_q: int32 [pieces + 1], the start of each piece and the end of the last one.
        max_length_q: tokens of the longest piece.
        pack: the text's pack, ignored.

    Returns:
        [1, T, heads, head size] and None for the attention weights.
    """
    kwargs.pop("cu_seq_lens_k", None)
    kwargs.pop("max_length_k", None)
    if cu_seq_lens_q is None or attention_mask is not None:
        return attend(module, query, key, value, attention_mask, kwargs), None
    kernel = _find_kernel(query)
    if kernel is not None and max_length_q is not None:
        pieces = Pieces(cu_seq_lens_q, max_length_q, cu_seq_lens_q, max_length_q)
        return kernel(query, key, value, pieces, kwargs.get("scaling"), EVERYTHING), None
    lengths = _find_pack(cu_seq_lens_q, methodcaller("tolist")).lengths
    return _attend_by_pieces(module, query, key, value, lengths, kwargs), None


def _belongs(pack: Pack, module: nn.Module, query: Tensor) -> bool:
    ranks = 1 if pack.sequence is None else pack.sequence.size
    return sum(pack.lengths) == query.shape[2] * ranks and getattr(module, "is_causal", True) is not False


# --- implementations -------------------------------------------------------------------------------------------------


def _attend_within(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: AttentionWindow | None,
    options: dict[str, Any],
) -> Tensor:
    scale = options.get("scaling")
    window = window if window is not None and window.size < pack.farthest else None
    plain = not options.get("dropout") and options.get("position_bias") is None and key.shape == value.shape
    plain = plain and read_score_change(module, options) is None
    kernel = _find_kernel(query, windowed=window is not None) if plain else None
    if kernel is not None:
        pieces = Pieces(pack.ends, pack.longest, pack.ends, pack.longest)
        if pack.shared:
            places, ends = pack.keys
            key, value = (each.index_select(2, places) for each in (key, value))
            pieces = Pieces(pack.ends, pack.longest, ends, pack.farthest)
        return kernel(query, key, value, pieces, scale, CAUSAL if window is None else (window.size - 1, 0))
    if window is not None:
        return _attend_by_segments(module, query, key, value, pack, window, options)
    if not pack.shared:
        return _attend_by_pieces(module, query, key, value, pack.lengths, options)
    if plain and query.device.type == "cpu" and pack.grouped:
        return attend_to_prompts(query, key, value, pack, scale)
    return _attend_by_segments(module, query, key, value, pack, window, options)


@lru_cache(maxsize=4)
def _cut_chunks(pack: Pack, size: int) -> Pack:
    """Return a pack's chunks, cached for all layers of a pass."""
    return pack.chunked(size)


def _places(pack: Pack) -> Tensor:
    """Return where this rank's tokens are in their sequences, int64 [1, T]."""
    return (pack.places if pack.sequence is None else pack.sequence.part(pack.places, 0))[None]


def _find_kernel(query: Tensor, *, windowed: bool = False) -> Kernel | None:
    return find_kernel(query.device, query.dtype, query.shape[-1], windowed=windowed)


def _attend_by_pieces(
    module: Any, query: Tensor, key: Tensor, value: Tensor, lengths: list[int], options: dict[str, Any]
) -> Tensor:
    equal = [(length, len(list(pieces))) for length, pieces in groupby(lengths)]
    cut = [length * pieces for length, pieces in equal]
    found = []
    for (_, pieces), *parts in zip(
        equal, *(tensor[0].split(cut, dim=1) for tensor in (query, key, value)), strict=True
    ):
        queries, keys, values = (part.unflatten(1, (pieces, -1)).transpose(0, 1) for part in parts)
        found.append(attend(module, queries, keys, values, None, options).flatten(0, 1))
    return torch.cat(found)[None]


def _attend_by_segments(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pack: Pack,
    window: AttentionWindow | None,
    options: dict[str, Any],
    row_mask: "RowMask | None" = None,
) -> Tensor:
    """Attend one segment at a time; each token sees the keys of its window, None: all up to itself.

    Within a segment, `row_mask` takes the place of this rule.
    """
    starts, found = [*pack.starts, query.shape[2]], list[Tensor]()
    for (start, end), behind in zip(pairwise(starts), pack.behind, strict=True):
        own, before = slice(start, end), 0
        seen = [own]
        if behind != NO_PROMPT:
            seen.insert(0, slice(starts[behind], starts[behind + 1]))
            before = starts[behind + 1] - starts[behind]
        keys, values = (torch.cat([each[:, :, part] for part in seen], 2) for each in (key, value))
        masked = before or row_mask is not None or (window is not None and window.size < end - start)
        mask = _mask(end - start, before, window, query.device) if masked else None
        if mask is not None and row_mask is not None:
            mask = torch.cat([mask[:, :before], row_mask.within(start, end)], 1)
        found.append(attend(module, query[:, :, own], keys, values, mask, options))
    return torch.cat(found, 1)


def _mask(tokens: int, before: int, window: AttentionWindow | None, device: torch.device) -> Tensor:
    """Return which keys each of the last tokens sees: bool [tokens, before + tokens]."""
    seen = torch.ones(tokens, before + tokens, dtype=torch.bool, device=device).tril(before)
    if window is None:
        return seen
    begins = window.begin(torch.arange(before, before + tokens, device=device))
    return seen & (torch.arange(before + tokens, device=device) >= begins[:, None])


# --- where pieces end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _CachedPack:
    tensor: ReferenceType[Tensor]
    version: int  # changes when the tensor is written to
    pack: Pack


_last: deque[_CachedPack] = deque(maxlen=4)  # a tower has two: pictures, and the windows in them


def _find_pack(tensor: Tensor, read_bounds: Callable[[Tensor], list[int]]) -> Pack:
    """Return the pack of a tensor, whose starts, and the last end, `read_bounds` reads.

    Reading waits for the device. All layers of a pass get the same tensor, so only the first one waits.
    """
    for seen in _last:
        if seen.tensor() is tensor and seen.version == tensor._version:
            return seen.pack
    pack = Pack.of([end - start for start, end in pairwise(read_bounds(tensor))], tensor.device)
    _last.append(_CachedPack(ref(tensor), tensor._version, pack))
    return pack


def _starts(position_ids: Tensor) -> list[int]:
    starts: list[int] = (position_ids.flatten() == 0).cpu().nonzero().flatten().tolist()
    return [*starts, position_ids.numel()]


# --- masks -----------------------------------------------------------------------------------------------------------


AND_MASK = and_masks().__qualname__  # of the functions that `and_masks` makes


@dataclass(frozen=True, slots=True)
class RowMask:
    """A model's own rule of which token of a packed row sees which, for tokens that also see later ones of a picture.

    It is asked for one segment at a time: the mask of a whole row would have its length squared.
    """

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, token, key) -> bool, of one shape
    tokens: int
    device: torch.device

    def within(self, start: int, end: int) -> Tensor:
        """Return which tokens of a segment see which: bool [tokens, tokens]."""
        own = torch.arange(start, end, device=self.device)
        return self._look(own[:, None], own)

    def looks_ahead(self) -> bool:
        """Whether some tokens, not all as in vision towers, see the next one."""
        own = torch.arange(self.tokens - 1, device=self.device)
        ahead = self._look(own, own + 1)
        return bool(ahead.any()) and not bool(ahead.all())

    def _look(self, tokens: Tensor, keys: Tensor) -> Tensor:
        first = tokens.new_zeros(())
        return self.sees(first, first, tokens, keys).expand(torch.broadcast_shapes(tokens.shape, keys.shape))


def packed_mask(
    *args: object, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any
) -> Any:
    """Return no mask where `packed_attention` needs none, else torch's: for padding and unknown windows."""
    if attention_mask is None and (local_size is None or _needs_no_mask(local_size, **kwargs)):
        if kwargs["batch_size"] == 1 and kwargs["q_length"] == kwargs["kv_length"]:
            if _is_regular(kwargs["mask_function"]):
                return None
            rule = RowMask(kwargs["mask_function"], kwargs["q_length"], torch.device(kwargs["device"]))
            return rule if rule.looks_ahead() else None
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, local_size=local_size, **kwargs)


def _is_regular(rule: Callable[..., Tensor]) -> bool:
    """Whether a rule lets no token see a later one (causal, and more conditions), or every token all others.

    It is read from the rule itself: to ask the rule (`RowMask.looks_ahead`) waits for the device.
    """
    if rule in (causal_mask_function, bidirectional_mask_function):
        return True
    return causal_mask_function in _conditions(rule)


def _conditions(rule: Callable[..., Tensor]) -> list[Callable[..., Tensor]]:
    """Return what `and_masks` joined, also in joined parts; of another rule, the rule."""
    if not inspect.isfunction(rule) or rule.__qualname__ != AND_MASK:
        return [rule]
    return [one for part in inspect.getclosurevars(rule).nonlocals["mask_functions"] for one in _conditions(part)]


def _needs_no_mask(
    window: int,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    config: PreTrainedConfig,
    device: Any,
    dtype: Any,
    **_: Any,
) -> bool:
    chunked = find_value(config, "attention_chunk_size") == window
    if (not chunked and find_value(config, "sliding_window") != window) or batch_size != 1 or q_length != kv_length:
        return False
    head = find_value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    device = torch.device(device)
    return chunked or device.type != "cuda" or find_kernel(device, dtype, head, windowed=True) is not None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(VISION_ATTENTION, vision_attention)
for _name in (PACKED_ATTENTION, VISION_ATTENTION):
    AttentionMaskInterface.register(_name, packed_mask)
