"""Weights that ranks write together: every bucket is gathered to one of them alone, and written by it meanwhile."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from r1_core.learner.parallel import Parallel, gather
from r1_rollout.weight_source import BucketWriter, Shapes
from r1_rollout.weights import Cut


def spread(shards: Iterable[tuple[str, Tensor]], parallel: Parallel, write: BucketWriter, max_bytes: int) -> Shapes:
    """Let each rank write buckets of whole tensors, cut as `weights.buckets` cuts them; return all shapes by name.

    All ranks must call this with the same tensors in the same order, of which each has its part. A bucket goes to the
    one with the fewest bytes so far of those that the writer can write from, or of all if there is none; while it
    writes, the others gather theirs. A rank holds two buckets at most beside its part: one that it writes, one that it
    gathers.

    Raises:
        OSError: this rank could not write, told when all have ended the pass; others may have written theirs.
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
    """What one rank writes, a bucket at a time, in a thread; nothing more after an error."""

    def __init__(self, write: BucketWriter, thread: ThreadPoolExecutor) -> None:
        self.bucket: list[tuple[str, Tensor]] = []  # that is being gathered
        self.error: Exception | None = None
        self._write, self._thread = write, thread
        self._number = -1  # of the bucket
        self._under_way: Future[None] | None = None

    def begin(self, number: int) -> None:
        """Write what has been gathered; the next bucket is this one."""
        if self.bucket:
            self.wait()
            if self.error is None:
                self._under_way = self._thread.submit(self._write, self._number, self.bucket)
            self.bucket = []
        self._number = number

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._under_way is not None:
            error = self._under_way.exception()
            self.error = self.error or (error if isinstance(error, Exception) else None)
            self._under_way = None
