"""A decoding step over the modules of known text models, without the overhead of their own forwards.

Only projections, unusual MLPs and the rotary embedding are called as modules, so adapters' hooks and quantised or tied
weights keep working. `agreement` checks a stack against its model when the engine is made.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.softmax import LOG2_E
from r1_rollout.token_kinds import cast_media

log = logging.getLogger("r1")

# Norms by the root mean square, rotations of whole heads by halves, two residuals a layer, no factors between them.
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen2VL", "Qwen2_5_VL", "Qwen3VLText", "Qwen3VLMoeText")
_LAYERS = frozenset(f"{family}DecoderLayer" for family in _FAMILIES)
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Stack:
    def __init__(self, text: PreTrainedModel, head: nn.Module, around: Sequence[nn.Module]) -> None:
        self._embed, self._rotary, self._norm, self._head = text.embed_tokens, text.rotary_emb, text.norm, head
        self._layers = [_Layer(layer) for layer in text.layers]
        gone_around = [*around, *text.layers, text.norm]
        for layer in self._layers:
            gone_around += [layer.attention, *layer.norms, *([layer.mlp] if layer.gated else [])]
        self._gone_around: list[nn.Module] = gone_around
        self._told = False

    def is_watched(self) -> bool:
        """Whether a module whose forward the stack skips has a hook that a step without pictures needs.

        Logs the first such hook of a stack once, because steps of the model's own forward take longer.
        """
        for one in self._gone_around:
            for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values()):
                if hook is not cast_media:
                    self._tell(one, hook)
                    return True
        return False

    def _tell(self, module: nn.Module, hook: object) -> None:
        if not self._told:
            log.warning(
                "%s has a forward hook (%s), so the engine decodes by the model's own forward: sampling takes longer "
                "and replays no CUDA graphs; remove the hook if it is not needed while sampling",
                type(module).__name__, getattr(hook, "__qualname__", type(hook).__name__),
            )  # fmt: skip
        self._told = True

    def step(self, tokens: Tensor, position_ids: Tensor, cache: GroupCache) -> Tensor:
        """Compute the next token's logits of every row.

        Args:
            tokens: int64 [rows].
            position_ids: int64 [rows, 1], or [axes, rows, 1].
            cache: with the rows' keys and values, aimed at this step.

        Returns:
            Logits [rows, vocabulary].
        """
        hidden = self._embed(tokens)
        cos, sin = (table[:, 0, None] for table in self._rotary(hidden[:, None], position_ids))
        half = cos.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # of `rotated`
        for number, layer in enumerate(self._layers):
            hidden = layer.step(hidden, cos, sin, number, cache)
        logits: Tensor = self._head(_normed(hidden, self._norm))
        return logits


class _Layer:
    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.mlp, self.gated = attention, mlp, _is_gated(mlp)
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        parts = dict(attention.named_children())
        self.query_norm, self.key_norm = parts.get("q_norm"), parts.get("k_norm")
        norms = (self.before, self.between, self.query_norm, self.key_norm)
        self.norms = [norm for norm in norms if norm is not None]
        self.size, self.scale = attention.head_dim, LOG2_E * attention.scaling

    def step(self, hidden: Tensor, cos: Tensor, sin: Tensor, number: int, cache: GroupCache) -> Tensor:
        attention, states = self.attention, _normed(hidden, self.before)
        query, key, value = (
            projection(states).unflatten(1, (-1, self.size))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = (
            _rotated(_normed(query, self.query_norm), cos, sin),
            _rotated(_normed(key, self.key_norm), cos, sin),
        )
        rows, heads, size = key.shape
        cache.write(key, value, number)
        attended = cache.attend(query.mul_(self.scale).view(rows, heads, -1, size))
        hidden += attention.o_proj(attended.to(hidden.dtype).reshape(rows, -1))
        states = _normed(hidden, self.between)
        if self.gated:
            gate = self.mlp.act_fn(self.mlp.gate_proj(states))
            hidden += self.mlp.down_proj(gate.mul_(self.mlp.up_proj(states)))
        else:  # of experts, who take a batch of sequences
            hidden += self.mlp(states[None])[0]
        return hidden


def stack_of(model: PreTrainedModel) -> Stack | None:
    """Return the stack of a model of a known family; None for any other."""
    text_config, head = model.config.get_text_config(), model.get_output_embeddings()
    for text in model.modules():
        if (
            not isinstance(text, PreTrainedModel)
            or text.config is not text_config
            or "layers" not in dict(text.named_children())
        ):
            continue
        parts = {name for name, _ in text.named_children()}
        known = parts == {"embed_tokens", "layers", "norm", "rotary_emb"} and _is_norm(text.norm)
        if not known or head is None or not all(map(_is_known, text.layers)):
            return None
        return Stack(text, head, [outer for outer in model.modules() if any(one is text for one in outer.modules())])
    return None


def _is_known(layer: nn.Module) -> bool:
    parts = dict(layer.named_children())
    if type(layer).__name__ not in _LAYERS or parts.keys() != _LAYER_PARTS:
        return False
    attention = dict(parts["self_attn"].named_children())
    norms = [part for name, part in attention.items() if name in ("q_norm", "k_norm")]
    others = attention.keys() - {"q_norm", "k_norm", "rotary_emb"}
    norms += [parts["input_layernorm"], parts["post_attention_layernorm"]]
    return others == _PROJECTIONS and all(map(_is_norm, norms))


def _is_norm(module: nn.Module) -> bool:
    return "variance_epsilon" in vars(module) and [name for name, _ in module.named_parameters()] == ["weight"]


def _is_gated(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} == _GATED


def _normed(states: Tensor, norm: Any) -> Tensor:
    if norm is None:
        return states
    if states.dtype == torch.float32:
        return F.rms_norm(states, (states.shape[-1],), norm.weight, norm.variance_epsilon)
    normed: Tensor = norm(states)  # rounds in its own order
    return normed


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [rows, heads, size] by cosines and sines [rows, 1, size], the first half of the sines negated."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
