"""Recurrent layers (linear attention, state-space models, short convolutions) over packed rows.

Their state would run from one sequence of a row into the next. So a layer's own forward runs once for segments of like
length, and its outputs are joined in the row's order. Answers to a shared prompt go on from the state at its end; if a
layer has no state that can be handed on, the prompt is computed before each answer, in this layer alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from r1_core.learner.pack import NO_PROMPT, Pack
from r1_rollout.embedded.states import RecurrentState, cache_argument, keeps_state

SHORT = 64  # tokens: such segments share a call whatever their lengths; others if none is over twice as long


class PackedMixer(nn.Module):
    """Put before a recurrent layer's class: computes each sequence of a packed row by itself."""

    pack: Pack | None = None
    layer_idx: int
    cache: str | None  # the argument for a state from which answers go on; None if they cannot

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pack", None)
        pack, width = self.pack, hidden_states.shape[1]
        if pack is None or len(pack.lengths) < 2 or len(hidden_states) > 1 or sum(pack.lengths) != width:
            return super().forward(hidden_states, *args, **kwargs)
        calls, found, known = plan_calls(pack, self.cache is not None), list[Any](), list[RecurrentState]()
        for runs in calls.runs:
            given = [runs.gather(each, width) for each in (hidden_states, *args)]
            named = {name: runs.gather(each, width) for name, each in kwargs.items()}
            state = None if runs.prompts is None else RecurrentState.join(known).select(runs.prompts)
            if runs.keeps:
                known.append(state := RecurrentState())
            if state is not None and self.cache is not None:
                named[self.cache] = Cache(layers=[state] * (self.layer_idx + 1))
            found.append(super().forward(*given, **named))
        parts = [one[0] if isinstance(one, tuple) else one for one in found]
        outputs = [part.flatten(0, 1).index_select(0, runs.kept) for part, runs in zip(parts, calls.runs, strict=True)]
        joined = torch.cat(outputs).index_select(0, calls.order)[None]
        return (joined, *found[0][1:]) if isinstance(found[0], tuple) else joined


def pack_recurrent_layers(model: PreTrainedModel) -> bool:
    """Let the model's recurrent layers read packs; return whether it has any."""
    holders = [layer for layer in model.modules() if any(map(_reads_no_pack, layer.children()))]
    for layer in holders:
        for mixer in filter(_reads_no_pack, layer.children()):
            own = type(mixer)
            mixer.__class__ = type(own.__name__, (PackedMixer, own), {"cache": cache_argument(own)})
        layer.register_forward_pre_hook(_hand_on, with_kwargs=True)
    if holders:
        model.register_forward_pre_hook(_hand_out, with_kwargs=True)
    return any(isinstance(module, PackedMixer) for module in model.modules())


def _reads_no_pack(module: nn.Module) -> bool:
    return keeps_state(module) and not isinstance(module, PackedMixer)


def _hand_out(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the pack to all mixers, for models that do not pass it on to their layers."""
    for module in model.modules():
        if isinstance(module, PackedMixer):
            module.pack = kwargs.get("pack")


def _hand_on(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give a layer's own pack to its mixers: that of another pass, where activations are computed again."""
    for child in layer.children() if "pack" in kwargs else ():
        if isinstance(child, PackedMixer):
            child.pack = kwargs["pack"]


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runs:
    """Segments of one call, padded with repetitions of their last token."""

    count: int
    places: Tensor  # int64 [count × longest], in the row
    kept: Tensor  # int64 [tokens], indices of `places` that are neither repetitions nor a prompt computed again
    prompts: Tensor | None = None  # int64 [count], the prompt whose state each goes on from
    keeps: bool = False  # they are prompts of one length, whose states are kept

    def gather(self, given: Any, width: int) -> Any:
        """From [1, T, …] to [count, longest, …]; tuples too, and nothing else."""
        if isinstance(given, tuple):
            return tuple(self.gather(each, width) for each in given)
        if not isinstance(given, Tensor) or given.shape[:2] != (1, width):
            return given
        return given[0].index_select(0, self.places).unflatten(0, (self.count, -1))

    def to(self, device: torch.device) -> "Runs":
        prompts = None if self.prompts is None else self.prompts.to(device)
        return replace(self, places=self.places.to(device), kept=self.kept.to(device), prompts=prompts)


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a layer for a row.

    Example: a prompt of 5 tokens with answers of 3 and 4 is two calls, of [1, 5] and of [2, 4] tokens.
    """

    runs: list[Runs]
    order: Tensor  # int64 [T], where each token of the row is among the kept ones of all calls


@lru_cache(maxsize=4)
def plan_calls(pack: Pack, forks: bool) -> Calls:
    """Return the calls of a row, cached for all layers of a pass. `forks`: answers go on from their prompt's state."""
    segments = range(len(pack.lengths))
    prompts = sorted({pack.behind[each] for each in segments} - {NO_PROMPT}) if forks else []
    by_length = groupby(sorted(prompts, key=pack.lengths.__getitem__), key=pack.lengths.__getitem__)
    equal = [list(group) for _, group in by_length]
    number = {prompt: place for place, prompt in enumerate(chain.from_iterable(equal))}
    first = [each for each in segments if each not in number and pack.behind[each] not in number]
    answers = [each for each in segments if pack.behind[each] in number]
    runs = [_make_runs(pack, group, keeps=True) for group in equal]
    runs += [_make_runs(pack, group, again=not forks) for group in _group_by_length(pack, first)]
    for group in _group_by_length(pack, answers):
        runs.append(_make_runs(pack, group, prompts=torch.tensor([number[pack.behind[each]] for each in group])))
    places, device = torch.cat([each.places[each.kept] for each in runs]), pack.ends.device
    return Calls([each.to(device) for each in runs], places.argsort().to(device))


def _group_by_length(pack: Pack, segments: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for each in sorted(segments, key=lambda each: -pack.lengths[each]):
        if groups and pack.lengths[groups[-1][0]] <= max(SHORT, 2 * pack.lengths[each]):
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _make_runs(
    pack: Pack, segments: Sequence[int], *, prompts: Tensor | None = None, keeps: bool = False, again: bool = False
) -> Runs:
    """`again`: a segment's prompt, if it has one, is computed before it."""
    behind = [pack.behind[each] if again else NO_PROMPT for each in segments]
    before = [torch.arange(0) if each == NO_PROMPT else _span(pack, each) for each in behind]
    whole = [torch.cat([prompt, _span(pack, each)]) for prompt, each in zip(before, segments, strict=True)]
    longest = max(map(len, whole))
    if prompts is not None:  # some layers write to their state when they get a single token
        longest = max(longest, 2)
    places = torch.stack([torch.cat([one, one[-1:].expand(longest - len(one))]) for one in whole])
    kept = [
        row * longest + torch.arange(len(prompt), len(one))
        for row, (prompt, one) in enumerate(zip(before, whole, strict=True))
    ]
    return Runs(len(whole), places.flatten(), torch.cat(kept), prompts, keeps)


def _span(pack: Pack, segment: int) -> Tensor:
    return torch.arange(pack.starts[segment], pack.starts[segment] + pack.lengths[segment])
