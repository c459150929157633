"""Find the parameters at fault for a gap of the canary: groups are set to zero one by one on both sides."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from r1_rollout.errors import StaleWeights
from r1_rollout.lora import Adapter
from r1_rollout.names import adapter_part, core
from r1_rollout.probes import Probes
from r1_rollout.types import Generator, PromptLike, Replaying
from r1_rollout.weight_checks import Canary, probe_logprobs, widest_gap
from r1_rollout.weights import Weights, WeightSource

ParameterRows: TypeAlias = Mapping[str, Sequence[int] | None]  # by name of a tensor: its rows, None for all of them
_VISION = re.compile(r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector)\.")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|embedding|wte|embed_in|word_embeddings)\.")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
EMBEDDING, HEAD, NORM, VISION, ADAPTER = "embedding", "head", "final norm", "vision tower", "adapter"
_HIDING = {EMBEDDING, HEAD, NORM}  # without them all log-probs are alike, whatever else is wrong


class ComparedLearner(ABC):
    """The learner, for the search."""

    @abstractmethod
    def weights(self, version: int) -> WeightSource: ...

    @abstractmethod
    def logprobs_of(self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]]) -> list[list[float]]: ...

    @abstractmethod
    def zeroed(self, rows: ParameterRows) -> AbstractContextManager[None]: ...


class Engine(Generator, Replaying, Protocol): ...


@dataclass(frozen=True, slots=True)
class _Sight:
    engine: list[list[float]]
    learner: list[list[float]]

    @property
    def gap(self) -> float:
        return widest_gap(self.engine, self.learner)


def find_fault(
    canary: Canary, engine: Engine, reference: ComparedLearner, version: int, gap: float, *, same_bytes: bool = False
) -> StaleWeights:
    """Return the error for the gap that the canary has found, with the group of parameters at fault.

    The inactive engine is synced again, and only its log-probs are compared, so any engine works:

    1. The same weights once more. If that closes the gap, the sync had lost something.
    2. Sequences that it has never seen. If there is no gap on these, a cache was not reset.
    3. Without one group after the other (embedding, each layer, head, vision tower, adapter), zero on both sides. A
       group whose absence changes the learner and not the engine never arrives. If there is none, the group without
       which both agree arrives wrong: transposed, swapped, bound to another module.

    Limits: if several groups arrive wrong, none is found; embedding, final norm and head are distinguished only if they
    do not arrive; a gap just above the tolerance may be blamed on a neighbour. The engine must be synced before it
    samples.

    Args:
        same_bytes: the engine's weights are the learner's byte for byte, so its computation is at fault.
    """
    whole = _look(canary, engine, reference, version, canary.probes)
    verdict = _judge(canary, engine, reference, version, whole, same_bytes=same_bytes)
    seen = (
        "the engine's log-probs of fixed sequences differ from the learner's by "
        f"{gap:.3g} of their size (tolerance {canary.tolerance:g})"
    )
    return StaleWeights(*verdict, version=version, seen=seen, gap=gap)


def name_differing(names: Sequence[str], version: int) -> StaleWeights:
    groups = list(dict.fromkeys(map(group_of, names)))
    shown = ", ".join(groups[:5]) + (", …" if len(groups) > 5 else "")
    found = f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
    seen = f"the bytes of {len(names)} of the engine's weights are not the learner's"
    return StaleWeights(shown, found, version=version, seen=seen)


def _judge(
    canary: Canary, engine: Engine, reference: ComparedLearner, version: int, whole: _Sight, *, same_bytes: bool
) -> tuple[str, str]:
    if canary.accepts(whole.gap):
        return "the sync", "a second sync of the same weights closed the gap"
    unseen = canary.accepts(_look(canary, engine, reference, version, canary.fresh).gap)
    if unseen and canary.accepts(_look(canary, engine, reference, version, canary.probes.reversed()).gap):
        return "prefix cache", "on sequences that the engine has not seen there is no gap: a cache outlives the sync"
    if same_bytes:
        found = "their bytes are the learner's: look at positions, attention, precision and kernels"
        return "the engine's computation, not its weights", found
    sights: dict[str, _Sight] = {}
    groups = group_parameters(reference.weights(version).names(), canary.probes.inputs)
    for group, rows in groups.items():
        with reference.zeroed(rows):
            sights[group] = _look(canary, engine, reference, version, canary.probes)
    deaf = [
        group
        for group, sight in sights.items()
        if canary.accepts(widest_gap(sight.engine, whole.engine)) and not _same(canary, sight.learner, whole.learner)
    ]
    if deaf:
        return ", ".join(deaf), "set to zero, it changes the learner and not the engine: it never arrives"
    closing = {g: s.gap for g, s in sights.items() if g not in _HIDING and canary.accepts(s.gap)}
    if closing:
        return min(closing, key=lambda group: closing[group]), "set to zero on both sides, it leaves no gap"
    if groups.keys() == {ADAPTER}:
        return "base weights", "the gap is there without the adapter, too, and the sync carries nothing else"
    if unseen:
        return EMBEDDING, "rows of tokens that these sequences have and others have not: on others there is no gap"
    return "embedding, final norm or head", (
        "the gap is there without any one of the layers, too; or what no weight can explain: positions or precision"
    )


def _look(canary: Canary, engine: Engine, reference: ComparedLearner, version: int, probes: Probes) -> _Sight:
    with engine.active(reference.weights(version)):
        sampled = probe_logprobs(engine, probes, canary.temperature)
    return _Sight(sampled, reference.logprobs_of(probes.prompts, probes.responses))


def _same(canary: Canary, left: list[list[float]], right: list[list[float]]) -> bool:
    return canary.accepts(widest_gap(left, right))


def group_parameters(weights: Weights, inputs: set[int]) -> dict[str, ParameterRows]:
    """Return the rows to zero for each group, in the order of the model.

    Args:
        inputs: the tokens that the probes embed. An embedding's other rows are a tied head's.
    """
    groups: dict[str, dict[str, Sequence[int] | None]] = {}
    embedding: tuple[str, int] | None = None
    for name, tensor in weights.weights if isinstance(weights, Adapter) else weights:
        group = group_of(name)
        rows = None
        if group == EMBEDDING:
            embedding = name, tensor.shape[0]
            rows = sorted(token for token in inputs if token < tensor.shape[0])
        groups.setdefault(group, {})[name] = rows
    if embedding and HEAD not in groups:
        name, size = embedding
        groups[HEAD] = {name: [token for token in range(size) if token not in inputs]}
    return dict(groups)


def group_of(name: str) -> str:
    if adapter_part(name):
        return ADAPTER
    name = core(name)
    if _VISION.search(name):
        return VISION
    if found := _LAYER.search(name):
        return f"layer {found[3]}"
    if _EMBEDDING.search(name):
        return EMBEDDING
    return HEAD if _HEAD.search(name) else NORM
