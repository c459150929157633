"""The state of recurrent layers (linear attention, state-space models, short convolutions) of several sequences."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import isfunction, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

CACHES = ("cache_params", "past_key_values")  # what families call a layer's cache
ASKED = {"has_previous_state"}
_LINEAR = "get_linear_cache"  # what MiniMax's lightning attention asks instead
_FROM_ZERO = {"mamba_selective_scan"}  # scans of several tokens that go on from no state (Mamba 1)


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

    def select(self, sequences: Tensor, *, in_place: bool = False) -> "RecurrentState":
        """Return copies of the states of some sequences, int64 [N], which may repeat."""
        return _over([self], lambda parts: parts[0].index_select(0, sequences), in_place=in_place)

    def move(self, sources: Sequence[int], targets: Sequence[int], leaving: int) -> None:
        """Copy sequences to places of others, and drop the last `leaving`."""
        for tensors in (self.conv_states, self.recurrent_states):
            for index, tensor in tensors.items():
                tensor[targets] = tensor[sources]
                tensors[index] = tensor[: len(tensor) - leaving]

    @classmethod
    def join(cls, states: Sequence["RecurrentState"]) -> "RecurrentState":
        """Return the states of all sequences, one after another."""
        return _over(states, torch.cat, in_place=not states[0].record_past)


def _over(
    states: Sequence[RecurrentState], make: Callable[[list[Tensor]], Tensor], *, in_place: bool
) -> RecurrentState:
    first, made = states[0], RecurrentState(in_place=in_place)
    made.conv_states = {index: make([each.conv_states[index] for each in states]) for index in first.conv_states}
    made.recurrent_states = {
        index: make([each.recurrent_states[index] for each in states]) for index in first.recurrent_states
    }
    made.has_previous_state.update(first.has_previous_state)
    return made


class StateHolder(Cache):
    """A cache with the states of recurrent layers."""

    layers: list[RecurrentState]

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """Return the state of a layer of lightning attention (arXiv 2501.08313); None before its first tokens."""
        return self.layers[layer].recurrent_states.get(0)

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.layers[layer].update_recurrent_state(state)


def keeps_state(module: nn.Module) -> bool:
    """Whether a module mixes tokens by a state, for which it asks its cache."""
    kind: Any = type(module)
    return _keeps_state(kind)


@lru_cache(maxsize=4096)  # every call of an engine asks, and signatures of a whole model take milliseconds
def _keeps_state(kind: type[nn.Module]) -> bool:
    forwards = _forwards(kind)
    return any("hidden_states" in signature(one).parameters and _names(one) & {*ASKED, _LINEAR} for one in forwards)


def asks_linear_cache(kind: type[nn.Module]) -> bool:
    """Whether modules of a class keep the state of lightning attention."""
    return any(_LINEAR in _names(one) for one in _forwards(kind))


def cache_argument(kind: type[nn.Module]) -> str | None:
    """Return how modules of a class call the cache from whose state several tokens go on; None if they cannot.

    Lightning attention can, one token after another, which takes longer than to compute the tokens before again.
    """
    asking = [one for one in _forwards(kind) if _names(one) >= ASKED]
    if not asking or any(_names(one) & _FROM_ZERO for one in asking):
        return None
    return next(filter(CACHES.__contains__, signature(asking[0]).parameters), None)


def count_states(model: nn.Module) -> int:
    """Return the layers up to the last one with a state, 0 without any."""
    mixers: list[Any] = [module for module in model.modules() if keeps_state(module)]
    return 1 + max((mixer.layer_idx for mixer in mixers), default=-1)


def _forwards(kind: type[nn.Module]) -> list[Any]:
    """Return the forwards of a class and of those that it goes on from."""
    return [unwrap(vars(one)["forward"]) for one in kind.__mro__ if "forward" in vars(one)]


def _names(function: Any) -> set[str]:
    return {*function.__code__.co_names} if isfunction(function) else set()
