"""The weights of a learner on many devices, as engines take them up: bucket by bucket, none of them in the driver."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from r1_cli.cluster.batch import Put, Reference, to_array, to_tensor
from r1_cli.cluster.delivery import Ask, Way
from r1_rollout.errors import WeightsError
from r1_rollout.handover import WeightSource
from r1_rollout.lora import Adapter
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

    def names(self) -> list[tuple[str, Tensor]]:
        """Return what there is, as tensors without values: nothing is gathered."""
        found: list[tuple[str, tuple[int, ...]]] = self.ask("weight_shapes")
        return [(name, torch.empty(shape, device="meta")) for name, shape in found]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Bring the weights here, a bucket of whole tensors after the other."""
        for bucket in self._buckets(None, None):
            for name, packed in bucket:
                yield name, to_tensor(*packed)

    def references(self, dtype: torch.dtype | None) -> Iterator[Reference]:
        """Yield each bucket where rank 0 has put it down, cast to `dtype` before it was gathered.

        The next one is made when it is asked for: who lets go of a bucket before has two of them alive at most.
        """
        yield from self._buckets(dtype, self.putter)

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

    def hand_over(self, task: Callable[[Weights], Result]) -> Result:
        """Run `task` on the weights in rank 0's process."""
        result: Result = self.ask("hand_over", task)
        return result


def put_down(source: WeightSource, dtype: torch.dtype | None, put: Put) -> Iterator[Reference]:
    """Yield the buckets of any source of full weights as references.

    Raises:
        WeightsError: it brings an adapter.
    """
    if isinstance(source, RankedWeights):
        yield from source.references(dtype)
        return
    weights = source.tensors()
    if isinstance(weights, Adapter):
        raise WeightsError("an adapter came, but the engines of a cluster take full weights only")
    for bucket in buckets(weights, BUCKET, dtype):
        yield put([(name, to_array(tensor)) for name, tensor in bucket])
