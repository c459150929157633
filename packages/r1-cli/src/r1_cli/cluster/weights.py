"""The weights of a learner on many devices, as engines take them up: bucket by bucket, none of them in the driver."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from r1_cli.cluster.batch import Put, Reference, to_array, to_tensor
from r1_cli.cluster.delivery import Ask, Way
from r1_rollout.lora import Adapter
from r1_rollout.weight_source import BucketWriter, Shapes, WeightSource
from r1_rollout.weights import Weights, buckets

Result = TypeVar("Result")

BUCKET = 256 * 2**20  # bytes of weights in an object


@dataclass(frozen=True, slots=True)
class RankedWeights:
    """The `WeightSource` of one version on the ranks of a learner.

    Every engine can take it, for it can be iterated over here; an `EngineSet` asks for `references`, whose tensors the
    ranks put down and the engines read, and the driver never sees.
    """

    ask: Callable[..., Any]  # calls a verb of every rank, and returns rank 0's answer
    putter: Put  # what puts a value down on a rank
    version: int
    form: Adapter | None = None  # of an adapter that is trained in their place, without its factors

    def names(self) -> Weights:
        """Return what there is, as tensors without values: nothing is gathered."""
        found: list[tuple[str, tuple[int, ...]]] = self.ask("weight_shapes")
        return self._formed([(name, torch.empty(shape, device="meta")) for name, shape in found])

    def tensors(self) -> Weights:
        """Bring the weights here, a bucket of whole tensors after the other."""
        return self._formed(self.pairs())

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Bring what crosses here, by name: weights, or an adapter's factors."""
        for bucket in self._buckets(None, None):
            for name, packed in bucket:
                yield name, to_tensor(*packed)

    def _formed(self, pairs: Iterable[tuple[str, Tensor]]) -> Weights:
        return pairs if self.form is None else replace(self.form, weights=pairs)

    def references(self, dtype: torch.dtype | None) -> Iterator[Reference]:
        """Yield each bucket where rank 0 has put it down, cast to `dtype` before it was gathered, unless a factor.

        The next one is made when it is asked for: who lets go of a bucket before has two of them alive at most.
        """
        yield from self._buckets(dtype if self.form is None else None, self.putter)

    def _buckets(self, dtype: torch.dtype | None, put: Put | None) -> Iterator[Any]:
        self.ask("begin_weights", dtype)
        whole = False
        try:
            while (bucket := self.ask("next_weights", put)) is not None:
                yield bucket
            whole = True
        finally:
            if not whole:  # they gather together, so all of them have to end the pass
                self.ask("end_weights")

    def send(self, way: Way, hosts: Sequence[Ask], dtype: torch.dtype | None) -> None:
        """Let the ranks send them to the processes of engines, past the driver."""
        self.ask("send_weights", way, list(hosts), dtype)

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` on the weights in rank 0's process."""
        result: Result = self.ask("run_with_weights", task)
        return result

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        """Let the ranks write, each the buckets that are gathered to it."""
        shapes: Shapes = self.ask("spread_weights", write, max_bytes, dtype)
        return shapes


def put_down(source: WeightSource, dtype: torch.dtype | None, put: Put) -> tuple[Adapter | None, Iterator[Reference]]:
    """Return the buckets of any source as references, cast to `dtype`; of an adapter its form, and its factors as such.

    Factors are not cast: engines multiply them before they round.
    """
    if isinstance(source, RankedWeights):
        return source.form, source.references(dtype)
    weights = source.tensors()
    if isinstance(weights, Adapter):
        return replace(weights, weights=()), _put(buckets(weights.weights, BUCKET), put)
    return None, _put(buckets(weights, BUCKET, dtype), put)


def _put(parts: Iterable[list[tuple[str, Tensor]]], put: Put) -> Iterator[Reference]:
    for bucket in parts:
        yield put([(name, to_array(tensor)) for name, tensor in bucket])
