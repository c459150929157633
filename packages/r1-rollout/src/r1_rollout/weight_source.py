"""Sources of weights: handles that engines read from, so that the caller holds no tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.weights import Weights, buckets, named_tensors

Result = TypeVar("Result")
Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of all weights of one sync, by name


class BucketWriter(Protocol):
    """Writes buckets of weights in the process that has them; it pickles."""

    def reaches(self) -> bool: ...

    def __call__(self, number: int, bucket: list[tuple[str, Tensor]]) -> None: ...


class WeightSource(Protocol):
    """The weights of one version: in this process, or on the ranks of a learner."""

    @property
    def version(self) -> int: ...

    def names(self) -> Weights:
        """Return what `tensors` would, for its names and shapes only: values may be missing."""

    def tensors(self) -> Weights:
        """Yield them in this process one by one, named as in the checkpoint; or return an adapter."""

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` on them in the process that has them; the task and its result pickle."""

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        """Write full weights from the processes that have them, each bucket by one; return their shapes by name.

        Args:
            write: called with `buckets(weights, max_bytes, dtype)` and their numbers, as whole tensors, in any order.
            dtype: what floating-point tensors are cast to; None: they stay as they are.
        """


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A `WeightSource` in this process.

    Example: `LocalWeights(model.state_dict().items(), version=1)`.
    """

    weights: Weights | Callable[[], Weights]  # or what makes a pass over them, for sources that are read more than once
    version: int
    taken: Callable[[], object] | None = None  # called when an engine has read all of `tensors`

    def names(self) -> Weights:
        weights = self.weights() if callable(self.weights) else self.weights
        return cast(Weights, weights.items()) if isinstance(weights, Mapping) else weights

    def tensors(self) -> Weights:
        weights = self.names()
        if self.taken is None:
            return weights
        if isinstance(weights, Adapter):
            return replace(weights, weights=_followed(weights.weights, self.taken))
        return _followed(weights, self.taken)

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        return task(self.names())

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        weights, shapes = self.names(), Shapes()
        if isinstance(weights, Adapter):
            raise WeightsError("an adapter is not cut into buckets: hand it over")
        for number, bucket in enumerate(buckets(named_tensors(weights), max_bytes, dtype)):
            write(number, bucket)
            shapes |= {name: tuple(tensor.shape) for name, tensor in bucket}
        return shapes


@dataclass(frozen=True, slots=True)
class TransferCall:
    """A call of vLLM's weight transfer for an engine to make.

    Example: `TransferCall("update_weights", {"update_info": {"names": ["lm_head.weight"], …}})`.
    """

    verb: str
    request: Mapping[str, Any] = field(default_factory=dict)  # empty where the call takes none


@dataclass(frozen=True, slots=True)
class DirectWeights:
    """A `WeightSource` whose tensors bypass this process: the engine makes its sender's calls."""

    calls: Callable[[], Iterator[TransferCall]]
    version: int

    def names(self) -> Weights:
        raise WeightsError("these weights come by vLLM's own transfer, which this engine does not take part in")

    def tensors(self) -> Weights:
        return self.names()

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        return task(self.names())

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        return LocalWeights(self.names(), self.version).spread(write, max_bytes, dtype)


def _followed(weights: Iterable[tuple[str, Tensor]], taken: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    yield from weights
    taken()


def known(weights: Iterable[tuple[str, Tensor]], came: Shapes, first: Shapes) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights`, and add their shapes to `came`. Raises WeightsError if one was not in the first sync.

    vLLM would keep such a tensor and load it again in every later sync.

    Args:
        first: shapes of the first sync; empty before it.
    """
    for name, tensor in weights:
        note(name, tuple(tensor.shape), came, first)
        yield name, tensor


def note(name: str, shape: tuple[int, ...], came: Shapes, first: Shapes) -> None:
    came[name] = shape
    if first and first.get(name) != shape:
        raise WeightsError(f"{name} {_differs(name, first, came)}")


def require_same(first: Shapes, came: Shapes) -> None:
    differing = [name for name in sorted(first.keys() | came.keys()) if first and first.get(name) != came.get(name)]
    if differing:
        shown = "; ".join(f"{name} {_differs(name, first, came)}" for name in differing[:5])
        raise WeightsError(f"{len(differing)} weights are not those of the first sync: {shown}")


def _differs(name: str, first: Shapes, came: Shapes) -> str:
    now, before = (list(shapes[name]) if name in shapes else None for shapes in (came, first))
    return f"is {'missing' if now is None else now}, was {'unknown' if before is None else before}"
