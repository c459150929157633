"""Hand-over of weights: a handle that engines read from, so that whoever calls them holds no tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.weights import Weights

Result = TypeVar("Result")


class WeightSource(Protocol):
    """The weights of one version, wherever they are: in this process, or on the ranks of a learner."""

    @property
    def version(self) -> int:
        """The number of the step that made them."""

    def names(self) -> Weights:
        """Return what `tensors` would, of which only names and shapes are looked at: no values need be there."""

    def tensors(self) -> Weights:
        """Bring them into this process, one after the other, named as in the checkpoint; or an adapter alone."""

    def hand_over(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` on them in the process that has them; only the task and what it returns travel, as pickles."""


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A `WeightSource` in this process.

    Example: `LocalWeights(model.state_dict().items(), version=1)`.
    """

    weights: Weights | Callable[[], Weights]  # or what makes a pass over them, for sources that are read more than once
    version: int
    taken: Callable[[], object] | None = None  # called when an engine has read all of `tensors`

    def names(self) -> Weights:
        """Return the weights: they are here."""
        weights = self.weights() if callable(self.weights) else self.weights
        return cast(Weights, weights.items()) if isinstance(weights, Mapping) else weights

    def tensors(self) -> Weights:
        """Return the weights; a state dict stands for its items."""
        weights = self.names()
        if self.taken is None:
            return weights
        if isinstance(weights, Adapter):
            return replace(weights, weights=_followed(weights.weights, self.taken))
        return _followed(weights, self.taken)

    def hand_over(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` here."""
        return task(self.names())


@dataclass(frozen=True, slots=True)
class Call:
    """A sender's call of vLLM's weight transfer, to be made in an engine.

    Example: `Call("update_weights", {"update_info": {"names": ["lm_head.weight"], …}})`.
    """

    verb: str
    request: Mapping[str, Any] = field(default_factory=dict)  # empty where the call takes none


@dataclass(frozen=True, slots=True)
class Delivered:
    """A `WeightSource` whose tensors do not pass through here: an engine makes the sender's calls, which bring them."""

    calls: Callable[[], Iterator[Call]]
    version: int

    def names(self) -> Weights:
        """Raise WeightsError: only the sender knows them."""
        raise WeightsError("these weights come by vLLM's own transfer, which this engine does not take part in")

    def tensors(self) -> Weights:
        """Raise WeightsError: they are on the way from GPU to GPU."""
        return self.names()

    def hand_over(self, task: Callable[[Weights], Result]) -> Result:
        """Raise WeightsError: they are in the sender's process."""
        return task(self.names())


def _followed(weights: Iterable[tuple[str, Tensor]], taken: Callable[[], object]) -> Iterator[tuple[str, Tensor]]:
    yield from weights
    taken()
