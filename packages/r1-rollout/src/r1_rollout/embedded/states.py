"""The state of recurrent layers (linear attention, state-space models, short convolutions) of several sequences."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import isfunction, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin

CACHES = ("cache_params", "past_key_values")  # what families call a layer's cache
ASKED = {"has_previous_state"}


class RecurrentState(LinearAttentionCacheLayerMixin):
    """A layer's tensors [sequences, …], replaced in each pass instead of written to, so that gradients flow.

    With `in_place` a pass over single tokens may write to the window of the convolution.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        self.has_previous_state = defaultdict(bool, {0: False})
        self.record_past = not in_place

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        known = self.conv_states.get(state_idx)
        if known is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            whole = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size, whole = known.shape[-1], torch.cat([known, conv_states], dim=-1)
        self.conv_states[state_idx], self.has_previous_state[state_idx] = whole[..., -size:], True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx], self.has_previous_state[state_idx] = recurrent_states, True
        return recurrent_states

    def select(self, sequences: Tensor) -> "RecurrentState":
        """Return copies of the states of some sequences, int64 [N], which may repeat."""
        return _over([self], lambda parts: parts[0].index_select(0, sequences))

    @classmethod
    def join(cls, states: Sequence["RecurrentState"]) -> "RecurrentState":
        """Return the states of all sequences, one after another."""
        return _over(states, torch.cat)


def _over(states: Sequence[RecurrentState], make: Callable[[list[Tensor]], Tensor]) -> RecurrentState:
    first, made = states[0], RecurrentState(in_place=not states[0].record_past)
    made.conv_states = {index: make([each.conv_states[index] for each in states]) for index in first.conv_states}
    made.recurrent_states = {
        index: make([each.recurrent_states[index] for each in states]) for index in first.recurrent_states
    }
    made.has_previous_state.update(first.has_previous_state)
    return made


def keeps_state(module: nn.Module) -> bool:
    """Whether a module mixes tokens by a state, for which it asks its cache."""
    forward = unwrap(type(module).forward)
    return "hidden_states" in signature(forward).parameters and bool(_names(forward) & {*ASKED, "get_linear_cache"})


def cache_argument(kind: type[nn.Module]) -> str | None:
    """Return how modules of a class call the cache of their `RecurrentState`; None if they have another (MiniMax)."""
    forward = unwrap(kind.forward)
    return next(filter(CACHES.__contains__, signature(forward).parameters)) if _names(forward) >= ASKED else None


def _names(function: Any) -> set[str]:
    return {*function.__code__.co_names} if isfunction(function) else set()
