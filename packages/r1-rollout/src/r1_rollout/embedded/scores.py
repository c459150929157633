"""Attention whose scores torch's kernels do not compute: bounded ones, and sinks that take a share of each softmax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from r1_rollout.tokens import setting

# Tensors that layers hand to their attention and that change no score, or that torch's attention takes.
HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "image_grid_thw", "logits_to_keep", "max_length_k",
    "max_length_q", "mm_token_type_ids", "position_bias", "position_ids", "s_aux", "second_per_grid_ts", "seq_idx",
    "token_type_ids", "video_grid_thw",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoreChange:
    """What a layer does to its scores before their softmax."""

    softcap: float | None  # they become softcap · tanh(score / softcap) (Gemma 2, arXiv 2408.00118, section 2)
    sinks: Tensor | None  # [heads]: scores of one more key, whose value is 0 (gpt-oss, arXiv 2508.10925)

    def bound(self, scores: Tensor, unit: float = 1.0) -> Tensor:
        """Bound scores, which are `unit` times the natural ones."""
        return scores if self.softcap is None else (cap := self.softcap * unit) * torch.tanh(scores / cap)


def read_score_change(module: nn.Module, options: Mapping[str, Any]) -> ScoreChange | None:
    """Return what the keywords that a layer gives to its attention do to its scores; None: nothing.

    Raises:
        ValueError: an option may change them in a way that is not known here.
    """
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    unknown = {name for name, value in options.items() if isinstance(value, Tensor) and name not in HARMLESS}
    unknown |= {name for name in ("alibi", "head_mask", "sinks") if options.get(name) is not None}
    if unknown:
        raise ValueError(f"{type(module).__name__} changes its attention scores by {', '.join(sorted(unknown))}")
    return None if softcap is None and sinks is None else ScoreChange(softcap, sinks)


def counts_by_call(module: nn.Module) -> bool:
    """Whether a layer scales its queries by their places in the call (Llama 4's layers without rotary embeddings)."""
    return bool(setting(module, "attn_temperature_tuning")) and not setting(module, "use_rope")


def retune(module: nn.Module, query: Tensor, places: Callable[[], Tensor], before: int = 0) -> Tensor:
    """Scale queries by their places in their sequences, if the layer has scaled them by their places in the call.

    The factor is log(1 + floor((place + 1) / floor)) · scale + 1 (arXiv 2501.19399).

    Args:
        query: [batch, heads, T, size].
        places: returns int64 [batch, T].
        before: the place that the layer gave to the first token of the call.
    """
    if not counts_by_call(module):
        return query
    floor, scale = setting(module, "floor_scale"), setting(module, "attn_scale")
    given = torch.arange(before, before + query.shape[2], device=query.device)
    wanted, had = (torch.log1p(((each + 1.0) / floor).floor()) * scale + 1.0 for each in (places(), given))
    return (query * (wanted / had)[:, None, :, None]).to(query.dtype)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Attend as transformers' `sdpa_attention_forward` does, and with the layer's own change of its scores.

    Args:
        query: [batch, heads, T, size]; key and value [batch, key heads, K, size].
        mask: bool, true where a token sees a key, or float, added to the scores: [T, K] or [batch, 1, T, K]. None:
            causal if the layer is.

    Returns:
        [batch, T, heads, size].

    Raises:
        ValueError: as `read_score_change`.
    """
    change = read_score_change(module, options)
    if change is None:
        found: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
        return found
    scaling, (tokens, size), keys = options.get("scaling"), query.shape[2:], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, key heads, heads a key head, T, size]
    scores = grouped @ key[:, :, None].transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    scores = change.bound(scores.to(torch.promote_types(scores.dtype, torch.float32)))
    causal = options.get("is_causal")
    if mask is None and tokens > 1 and (setting(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        mask = mask if mask.dim() == 2 else mask[:, :, None]
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if change.sinks is not None:
        sinks = change.sinks.to(scores.dtype).view(1, key.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., :keys].to(value.dtype)
    if options.get("dropout"):  # which is 0 outside of training
        weights = nn.functional.dropout(weights, options["dropout"])
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2)
