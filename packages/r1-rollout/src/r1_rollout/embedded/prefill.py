"""Prefill in the embedded engine: batches of prompts, or of what stands behind prefixes that have been computed."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from r1_rollout.embedded.attention import continuing, is_latent
from r1_rollout.embedded.forward import Forward
from r1_rollout.embedded.kv import KeysValues
from r1_rollout.embedded.prefix_cache import Prefix
from r1_rollout.embedded.states import RecurrentState, StateHolder
from r1_rollout.embedded.windows import AttentionWindow
from r1_rollout.routing import Routing
from r1_rollout.types import PromptLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPTS = 16  # per forward; with _TOKENS it bounds the logits and activations
_SHORT = 64  # tokens: such prompts go together whatever their lengths
_TOKENS = 16384  # per forward, padding included, unless one prompt alone has more


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """What is to be computed of a prompt: all of it, or what stands behind a prefix."""

    prompt: PromptLike
    inputs: Mapping[str, Tensor]  # further arguments of the forward, of this part
    prefix: Prefix | None = None

    @property
    def known(self) -> int:
        return self.prefix.length if self.prefix else 0

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) - self.known


def prefill_batches(lengths: Sequence[int], known: Sequence[int] = (), *, equal: bool = False) -> list[list[int]]:
    """Return batches of indices in which no part is more than twice as long as another.

    Args:
        lengths: tokens to compute of each prompt.
        known: tokens before them, whose keys and values take memory, too; none if empty.
        equal: all parts of a batch are of one length, as a state would run on into the padding.
    """
    batches: list[list[int]] = []
    before = 0  # the most tokens that are known of a prompt of the last batch
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        batch, own = batches[-1] if batches else [], known[index] if known else 0
        longest = lengths[batch[0]] if batch else 0
        alike = longest <= (lengths[index] if equal else max(2 * lengths[index], _SHORT))
        fits = len(batch) < _PROMPTS and (len(batch) + 1) * (longest + max(before, own)) <= _TOKENS
        if batch and alike and fits:
            batch.append(index)
            before = max(before, own)
        else:
            batches.append([index])
            before = own
    return batches


def alike(inputs: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """Return the indices of inputs that can be concatenated: those of one name agree in all but their first axis."""
    parts: list[tuple[list[int], dict[str, tuple[int, ...]]]] = []
    for index, one in enumerate(inputs):
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in one.items()}
        for indices, kind in parts:
            if kind | shapes == shapes | kind:
                indices.append(index)
                kind.update(shapes)
                break
        else:
            parts.append(([index], shapes))
    return [indices for indices, _ in parts]


def distinct_parts(parts: Sequence[PrefillPart]) -> tuple[list[PrefillPart], list[int]]:
    """Return the parts without copies of one prompt, and the place there of each of `parts`.

    Copies share their lists of tokens, as the first requests of a group's agents do. Nothing else is compared.
    """
    distinct: list[PrefillPart] = []
    known: dict[tuple[int, ...], int] = {}
    places = []
    for part in parts:
        prompt = part.prompt
        key = (id(prompt.token_ids), id(prompt.position_ids), id(prompt.model_inputs), id(part.prefix))
        if key not in known:
            known[key] = len(distinct)
            distinct.append(part)
        places.append(known[key])
    return distinct, places


class Prefilled(NamedTuple):
    """What a forward over prompts leaves behind."""

    layers: list[KeysValues]  # of the whole prompts
    states: list[RecurrentState]  # at the prompts' ends; empty without recurrent layers
    logits: Tensor  # [prompts, vocabulary], after each prompt
    routed: Sequence[Tensor] = ()  # experts of each whole prompt, [prompt_length, routers, k]; empty if not recorded

    def select(self, prompts: Sequence[int]) -> "Prefilled":
        places = torch.tensor(prompts, device=self.logits.device)
        layers = [KeysValues(keys[places], values[places]) for keys, values in self.layers]
        routed = [self.routed[prompt] for prompt in prompts if self.routed]
        return Prefilled(layers, [state.select(places) for state in self.states], self.logits[places], routed)


def prefill(
    model: "PreTrainedModel",
    parts: Sequence[PrefillPart],
    filler: int,
    states: int = 0,
    routing: Routing | None = None,
) -> Prefilled:
    """Run parts of prompts, padded on the right, through the model.

    Args:
        parts: all with a prefix or all without; their inputs are alike, see `alike`.
        filler: the token to pad with; not a placeholder of media, for those are counted.
        states: layers up to the last one with a state; then the parts are of one length.
        routing: records the experts.
    """
    device, lengths = model.device, [part.length for part in parts]
    rotary = [rotary_axes(part.prompt.position_ids)[:, part.known :] for part in parts]
    token_ids = torch.full((len(parts), max(lengths)), filler)
    position_ids = torch.zeros(len(rotary[0]), len(parts), max(lengths), dtype=torch.int64)
    for row, (part, positions) in enumerate(zip(parts, rotary, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor(part.prompt.token_ids[part.known :])
        position_ids[:, row, : lengths[row]] = positions
    inputs = [part.inputs for part in parts]
    media = {
        name: torch.cat([one[name] for one in inputs if name in one]).to(device) for name in sorted({*chain(*inputs)})
    }
    prefixes = [part.prefix for part in parts if part.prefix]
    cache: Cache = StateCache(states) if states else DynamicCache()
    if prefixes:
        cache = ContinuedCache(prefixes, max(lengths))
    if isinstance(cache, ContinuedCache):
        media["mask"] = cache.mask
    ends = sorted({*lengths})
    masked = continuing(cache) if isinstance(cache, ContinuedCache) else nullcontext()
    with masked, nullcontext() if routing is None else routing.recording() as record:
        logits = Forward(model)(
            token_ids.to(device),
            without_lone_axis(position_ids).to(device),
            cache,
            logits_to_keep=torch.tensor(ends, device=device) - 1,
            **media,
        )
        routed = [] if record is None else _routed_prompts(parts, record().unflatten(0, token_ids.shape))
    if isinstance(cache, ContinuedCache | StateCache):
        layers = cache.filled
    else:
        layers = [KeysValues(x.keys, x.values) for x in cache.layers]
    # Some families take no `logits_to_keep` and return all.
    kept = ends if logits.shape[1] == len(ends) else [*range(1, 1 + logits.shape[1])]
    latent: dict[int, Any] = {one.layer_idx: one for one in model.modules() if is_latent(one)}
    return Prefilled(
        [KeysValues(*latent[i].expand_kv(*layer)) if i in latent else layer for i, layer in enumerate(layers)],
        cache.layers if isinstance(cache, StateCache) else [],
        logits[range(len(parts)), [*map(kept.index, lengths)]],
        routed,
    )


def _routed_prompts(parts: Sequence[PrefillPart], routed: Tensor) -> list[Tensor]:
    """Return the experts of whole prompts, given those of their parts [parts, columns, routers, k]."""
    found = []
    for part, own in zip(parts, routed, strict=True):
        before = [] if part.prefix is None or part.prefix.routed is None else [part.prefix.routed]
        found.append(torch.cat([*before, own[: part.length]]))
    return found


class StateCache(StateHolder):
    """The states of recurrent layers, and the keys and values of the others: none of a layer without attention."""

    def __init__(self, states: int) -> None:
        super().__init__(layers=[RecurrentState() for _ in range(states)])
        self.filled: list[KeysValues] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        none = KeysValues(key_states[:, :0], value_states[:, :0])
        self.filled += [none] * (layer_idx - len(self.filled))
        self.filled.append(KeysValues(key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class ContinuedCache(Cache):
    """Keys and values of prefixes, and room behind each for further tokens."""

    def __init__(self, prefixes: Sequence[Prefix], columns: int) -> None:
        """`columns`: tokens that follow each prefix, padding included."""
        super().__init__(layers=[])
        first, lengths = prefixes[0].states, [prefix.length for prefix in prefixes]
        layers, both, heads, _, size = first.shape
        states = first.new_zeros(layers, both, len(prefixes), heads, max(lengths) + columns, size)
        for row, prefix in enumerate(prefixes):
            states[:, :, row, :, : prefix.length] = prefix.states
        self.filled = [KeysValues(*layer) for layer in states]
        self._longest = max(lengths)
        self._rows = torch.arange(len(prefixes), device=first.device)[:, None]
        self.places = torch.tensor(lengths, device=first.device)[:, None] + torch.arange(columns, device=first.device)
        self._masks: dict[AttentionWindow | None, Tensor] = {}
        self.mask = self.see(None)

    def see(self, window: AttentionWindow | None) -> Tensor:
        """Return which keys a token sees: those of its prefix and what follows it up to itself, within the window.

        Returns:
            bool [prompts, 1, columns, all columns].
        """
        if window not in self._masks:
            own = self.places[:, None, :, None]
            keys = torch.arange(self.filled[0].keys.shape[2], device=own.device)
            self._masks[window] = keys <= own if window is None else (keys <= own) & (keys >= window.begin(own))
        return self._masks[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for own, new in zip(self.filled[layer_idx], (key_states, value_states), strict=True):
            own[self._rows, :, self.places] = new.transpose(1, 2)
        return self.filled[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest


def rotary_axes(position_ids: Tensor) -> Tensor:
    """Drop M-RoPE's text axis, which only tells packed sequences apart: [axes, length] -> [1 or axes - 1, length]."""
    return position_ids[1:] if len(position_ids) > 1 else position_ids


def without_lone_axis(position_ids: Tensor) -> Tensor:
    """Drop a single axis: models without M-RoPE take [batch, length]."""
    return position_ids[0] if len(position_ids) == 1 else position_ids
