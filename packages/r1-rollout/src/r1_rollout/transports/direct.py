"""Direct weight transfer: buckets from GPU to GPU, without a copy on disk or in the driver.

The workers receive by vLLM's own weight transfer. Over NCCL and CUDA IPC this has NEVER RUN on GPUs: tests check the
order of the calls, and run the same code over TCP between CPUs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from r1_rollout.transports.groups import ProcessGroup
from r1_rollout.types import Json, JsonObject
from r1_rollout.weights import buckets

BUCKET = 1 << 28  # bytes of weights in flight, on each GPU
Bucket: TypeAlias = list[tuple[str, Tensor]]
Pass: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]  # makes one pass over the weights, whole tensors


class WeightSyncClient(Protocol):
    """The workers of one engine or several. A call returns when all are done; vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Json) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def describe(bucket: Bucket) -> JsonObject:
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


class Link:
    """Sends buckets to the workers of one group: those of one server, or of all engines of a cluster."""

    def __init__(
        self, workers: WeightSyncClient, group: ProcessGroup, seconds: Callable[[], float | None] = lambda: None
    ) -> None:
        """`seconds` returns how long to wait for the group here after the workers have answered; None: for ever."""
        self._workers, self._group, self._seconds = workers, group, seconds

    def open(self) -> None:
        info = self._group.init_info
        self._together(lambda: self._workers.init_weight_transfer_engine(info), self._group.connect)

    def send(self, bucket: Bucket) -> None:
        tensors = [tensor for _, tensor in bucket]
        self._together(lambda: self._workers.update_weights(describe(bucket)), lambda: self._group.send(tensors))

    def close(self) -> None:
        self._group.destroy()

    def _together(self, call: Callable[[], object], work: Callable[[], object]) -> None:
        """Make a call that the workers answer when `work` has been done in the group here.

        If one of the two fails the group is ended, or the other would wait in it for ever.
        """
        failed: list[Exception] = []

        def run() -> None:
            try:
                work()
            except Exception as error:  # raised below
                failed.append(error)
                self._group.destroy()

        thread = threading.Thread(target=run, daemon=True, name="r1-sending")
        thread.start()
        try:
            call()
        except BaseException as error:
            self._group.destroy()
            thread.join(self._seconds())
            if failed:
                error.add_note(f"the sender's end: {type(failed[0]).__name__}: {failed[0]}")
            raise
        thread.join(self._seconds())
        if thread.is_alive():
            self._group.destroy()
            raise TimeoutError("the workers say that they have weights which are still being sent")
        if failed:
            raise failed[0]


class GroupSender:
    """Sends from rank 0 to a group of all workers. Every rank has one, as ranks gather the weights together."""

    def __init__(self, workers: WeightSyncClient, group: ProcessGroup | None, weights: Pass) -> None:
        self._workers, self._weights = workers, weights
        self._link = None if group is None else Link(workers, group)
        if self._link is not None:
            self._link.open()

    def send(self) -> None:
        """Send all weights; returns when the engines have them.

        If an engine or the group fails, all ranks end the pass, then the error is raised and the group has ended.
        """
        parts = buckets(self._weights(), BUCKET)
        try:
            if self._link is not None:
                self._workers.start_weight_update()
                for bucket in parts:
                    self._link.send(bucket)
                self._workers.finish_weight_update()
        finally:
            for _ in parts:  # ranks that gather have to do so together
                pass

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class IpcSender:
    """Shares the ranks' GPU memory with the engines on the same GPUs. Every rank has one; rank 0 calls the engines.

    vLLM gathers all ranks' handles over the default process group, so that must be the ranks alone. Each worker takes
    the handle of its own GPU.
    """

    def __init__(self, workers: WeightSyncClient, rank: int, weights: Pass, largest: int) -> None:
        """`largest`: bytes of the largest tensor, which must fit in the buffer."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        self._workers = UntilError(workers)
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUCKET, largest))
        source = _Repeated(weights)
        self._sender = IPCTrainerWeightTransferEngine.trainer_init(info, client=self._workers, source=source)

    def send(self) -> None:
        self._workers.raise_error()
        self._sender.send_weights()
        self._workers.raise_error()

    def close(self) -> None:
        self._sender.shutdown()


@dataclass(frozen=True, slots=True)
class _Repeated:
    weights: Pass

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights())


class UntilError:
    """Workers that are not called after an error, so that all ranks end their pass."""

    def __init__(self, workers: WeightSyncClient) -> None:
        self._workers = workers
        self._error: Exception | None = None

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        self._try(self._workers.init_weight_transfer_engine, init_info)

    def start_weight_update(self) -> None:
        self._try(self._workers.start_weight_update)

    def update_weights(self, update_info: Json) -> None:
        self._try(self._workers.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._try(self._workers.finish_weight_update)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _try(self, call: Callable[..., None], *infos: Json) -> None:
        if self._error is None:
            try:
                call(*infos)
            except Exception as error:  # raised by `raise_error`
                self._error = error
