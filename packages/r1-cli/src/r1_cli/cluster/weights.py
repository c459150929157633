"""The weights of a learner on many ranks, sent to a pool's engines without passing the driver."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from r1_cli.cluster.batch_transfer import to_array, to_tensor
from r1_cli.cluster.direct import Ask, DirectBackend
from r1_cli.cluster.worker_group import Put, Reference
from r1_core.learner.parallel import Parallel, gather
from r1_rollout.lora import Adapter
from r1_rollout.weights import BucketWriter, Cut, Shapes, Weights, WeightSource, buckets

Result = TypeVar("Result")

BUCKET = 256 * 2**20  # bytes of weights in an object


@dataclass(frozen=True, slots=True)
class RankedWeights:
    """The `WeightSource` of one version on the ranks of a learner."""

    call: Callable[..., Any]  # calls a method of every rank, and returns rank 0's answer
    remote_put: Put  # what stores a value from the driver or a rank
    version: int
    form: Adapter | None = None  # of an adapter that is trained in their place, without its factors

    def names(self) -> Weights:
        found: list[tuple[str, tuple[int, ...]]] = self.call("weight_shapes")
        return self._formed([(name, torch.empty(shape, device="meta")) for name, shape in found])

    def tensors(self) -> Weights:
        return self._formed(self.pairs())

    def pairs(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what engines load, by name: weights, or an adapter's factors."""
        for bucket in self._buckets(None, None):
            for name, packed in bucket:
                yield name, to_tensor(*packed)

    def _formed(self, pairs: Iterable[tuple[str, Tensor]]) -> Weights:
        return pairs if self.form is None else replace(self.form, weights=pairs)

    def references(self, dtype: torch.dtype | None) -> Iterator[Reference]:
        """Yield references to buckets on rank 0, weights cast to `dtype` before gathering.

        Each is made on request: a caller that drops one first has at most two alive.
        """
        yield from self._buckets(dtype if self.form is None else None, self.remote_put)

    def _buckets(self, dtype: torch.dtype | None, put: Put | None) -> Iterator[Any]:
        self.call("begin_weights", dtype)
        whole = False
        try:
            while (bucket := self.call("next_weights", put)) is not None:
                yield bucket
            whole = True
        finally:
            if not whole:  # they gather together, so all of them have to end the pass
                self.call("end_weights")

    def send(self, backend: DirectBackend, engines: Sequence[Ask], dtype: torch.dtype | None) -> None:
        self.call("send_weights", backend, self.remote_put(list(engines)), dtype)

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result:
        result: Result = self.call("run_with_weights", task)
        return result

    def spread(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        shapes: Shapes = self.call("spread_weights", write, max_bytes, dtype)
        return shapes


def put_buckets(
    source: WeightSource, dtype: torch.dtype | None, put: Put
) -> tuple[Adapter | None, Iterator[Reference]]:
    """Return a source's adapter without its factors, and references to its buckets, weights cast to `dtype`.

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


# Writing by all ranks, for a transfer through a folder.


def spread(shards: Iterable[tuple[str, Tensor]], parallel: Parallel, write: BucketWriter, max_bytes: int) -> Shapes:
    """Let each rank write buckets of whole tensors, as `weights.buckets` splits them; return all shapes by name.

    All ranks must call this with the same tensors in the same order. A bucket is gathered to the rank with the fewest
    bytes so far, of those that see the folder, or of all if none does. While that rank writes, the others gather
    theirs: a rank has at most two buckets in memory besides its shard.

    Raises:
        OSError: this rank could not write, raised at the end of the pass; others may have written theirs.
    """
    device = "cpu" if parallel.mesh is None else parallel.mesh.device_type
    seeing = torch.zeros(parallel.world, device=device)
    seeing[parallel.rank] = float(write.reaches())
    writers = parallel.sum(seeing).nonzero().flatten().tolist() or range(parallel.world)
    written, cut, shapes = dict.fromkeys(writers, 0), Cut(max_bytes), Shapes()
    with ThreadPoolExecutor(1, thread_name_prefix="r1-writing") as thread:
        mine = _Writing(write, thread)
        number, owner = -1, -1
        for name, shard in shards:
            num_bytes = shard.numel() * shard.element_size()
            if (place := cut.place(num_bytes)) > number:
                number, owner = place, min(writers, key=written.__getitem__)
                mine.begin(number)
            written[owner] += num_bytes
            shapes[name] = tuple(shard.shape)
            tensor = gather(shard, owner)
            if parallel.rank == owner and tensor is not None:
                mine.bucket.append((name, tensor))
        mine.begin(number)
        mine.wait()
    if mine.error is not None:
        raise mine.error
    return shapes


class _Writing:
    """The buckets of one rank, written one at a time in a thread; nothing more after an error."""

    def __init__(self, write: BucketWriter, thread: ThreadPoolExecutor) -> None:
        self.bucket: list[tuple[str, Tensor]] = []  # that is being gathered
        self.error: Exception | None = None
        self._write, self._thread = write, thread
        self._number = -1  # of the bucket
        self._pending: Future[None] | None = None

    def begin(self, number: int) -> None:
        if self.bucket:
            self.wait()
            if self.error is None:
                self._pending = self._thread.submit(self._write, self._number, self.bucket)
            self.bucket = []
        self._number = number

    def wait(self) -> None:
        if self._pending is not None:
            error = self._pending.exception()
            self.error = self.error or (error if isinstance(error, Exception) else None)
            self._pending = None
