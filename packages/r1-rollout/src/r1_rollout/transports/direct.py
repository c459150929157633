"""Direct weight transfer: buckets from GPU to GPU, without a copy on disk or in the driver.

The workers receive by vLLM's own weight transfer. Over NCCL and CUDA IPC this has NEVER RUN on GPUs: tests check the
order of the calls, and run the same code over TCP between CPUs.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.transports.folder import PushedWeights, write_buckets
from r1_rollout.transports.groups import Group
from r1_rollout.weight_source import Shapes, WeightSource, known, require_same
from r1_rollout.weights import Weights, buckets

BUCKET = 1 << 28  # bytes of weights in flight, on each GPU
Bucket: TypeAlias = list[tuple[str, Tensor]]
Pass: TypeAlias = Callable[[], Iterable[tuple[str, Tensor]]]  # makes one pass over the weights, whole tensors


class Workers(Protocol):
    """The workers of one engine or several. A call returns when all are done; vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def describe(bucket: Bucket) -> dict[str, Any]:
    """Return names, dtypes and shapes of a bucket, as vLLM's weight transfer reads them."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


class Link:
    """Sends buckets to the workers of one group: those of one server, or of all engines of a cluster."""

    def __init__(self, workers: Workers, group: Group, seconds: Callable[[], float | None] = lambda: None) -> None:
        """`seconds` returns how long to wait for the group here after the workers have answered; None: for ever."""
        self._workers, self._group, self._seconds = workers, group, seconds

    def open(self) -> None:
        """Let the workers join the group."""
        info = self._group.init_info
        self._together(lambda: self._workers.init_weight_transfer_engine(info), self._group.connect)

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; returns when every worker has loaded it."""
        tensors = [tensor for _, tensor in bucket]
        self._together(lambda: self._workers.update_weights(describe(bucket)), lambda: self._group.send(tensors))

    def close(self) -> None:
        """End the group."""
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


# From all ranks to the engines of a cluster.


class GroupSender:
    """Sends from rank 0 to a group of all workers. Every rank has one, as ranks gather the weights together."""

    def __init__(self, workers: Workers, group: Group | None, weights: Pass) -> None:
        """Let the workers join; `group` is None on all ranks but 0."""
        self._workers, self._weights = workers, weights
        self._link = None if group is None else Link(workers, group)
        if self._link is not None:
            self._link.open()

    def send(self) -> None:
        """Send all weights; returns when the engines have them.

        If an engine or the group fails, the error is raised when all ranks have ended the pass. The group has then
        ended, too.
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
        """End the group."""
        if self._link is not None:
            self._link.close()


class IpcSender:
    """Shares the ranks' GPU memory with the engines on the same GPUs. Every rank has one; rank 0 calls the engines.

    vLLM gathers all ranks' handles over the default process group, so that must be the ranks alone. Each worker takes
    the handle of its own GPU.
    """

    def __init__(self, workers: Workers, rank: int, weights: Pass, largest: int) -> None:
        """Let the workers know what will come. `largest`: bytes of the largest tensor, which must fit in the buffer."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

        self._workers = UntilError(workers)
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(BUCKET, largest))
        source: Any = _Repeated(weights)
        self._sender = IPCTrainerWeightTransferEngine.trainer_init(info, client=self._workers, source=source)

    def send(self) -> None:
        """Send all weights; returns when the engines have them. Raises an engine's error when the pass is over."""
        self._workers.raise_error()
        self._sender.send_weights()
        self._workers.raise_error()

    def close(self) -> None:
        self._sender.shutdown()


@dataclass(frozen=True, slots=True)
class _Repeated:
    """vLLM's source of weights: each iteration is a new pass."""

    weights: Pass

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights())


class UntilError:
    """Workers that are not called again after an error, so that ranks which gather together end their pass."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._error: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._try(self._workers.init_weight_transfer_engine, init_info)

    def start_weight_update(self) -> None:
        self._try(self._workers.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._try(self._workers.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._try(self._workers.finish_weight_update)

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        if self._error is not None:
            raise self._error

    def _try(self, call: Callable[..., None], *infos: Any) -> None:
        if self._error is None:
            try:
                call(*infos)
            except Exception as error:  # raised by `raise_error`
                self._error = error


# From one process to servers, each in a group of its own: in one group for all, a process that dies or hangs blocks the
# others in the same collective, which on GPUs only the end of the process breaks off.


class ServerLink(Protocol):
    """The sender's end of a transfer to one server. A call raises what the server has failed at."""

    def open(self) -> None:
        """Connect with the server's workers and begin an update."""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; returns when every worker has loaded it."""

    def finish(self, label: str) -> None:
        """End the update; returns when every worker says that it has the weights `label`."""

    def close(self) -> None:
        """Disconnect. If the update was not finished, the server's weights are of no version."""


class Receiver(Protocol):
    """A server as the process with the weights sees it; it pickles."""

    def link(self) -> ServerLink:
        """Return the sender's end of a transfer."""


class Receiving(Protocol):
    """A member of a pool that can be sent weights."""

    def receiver(self) -> Receiver:
        """Return what connects with it."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a push."""

    shapes: Shapes
    faults: tuple[Exception | None, ...]  # of each receiver; None: it has the weights


@dataclass(slots=True)
class DirectTransport:
    """Sends full weights to servers from the process that has them, and writes them for servers that fail meanwhile.

    Args:
        target: what the weights are called, and the new folder that they are written into.
        max_bytes: of a bucket; one is in memory at a time.
        dtype: what floating-point tensors are cast to; None: they stay as they are.
        first: shapes of the first weights, which these must have, too; empty if these are the first.
    """

    target: PushedWeights
    max_bytes: int
    dtype: torch.dtype | None = None
    first: Shapes = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)  # of what was sent

    def send(self, source: WeightSource, members: Sequence[Receiving]) -> Sequence[Exception | None]:
        task = partial(
            push,
            receivers=[member.receiver() for member in members],
            label=self.target.label,
            folder=self.target.folder,
            max_bytes=self.max_bytes,
            dtype=self.dtype,
            first=self.first,
        )
        sent = source.run_with_weights(task)
        self.shapes, self.target.tensors = sent.shapes, len(sent.shapes)
        return sent.faults


def push(
    weights: Weights,
    receivers: Sequence[Receiver],
    *,
    label: str,
    folder: Path,
    max_bytes: int,
    dtype: torch.dtype | None,
    first: Shapes,
) -> Sent:
    """Send full weights to all receivers in one pass; see `DirectTransport`. Runs where the weights are.

    Raises:
        WeightsError: these are not the weights that came first; no server calls them by the label.
        OSError: the folder cannot be written.
    """
    if isinstance(weights, Adapter):
        raise WeightsError("an adapter is not sent directly: servers load it from a folder")
    shapes = Shapes()
    with ExitStack() as ending, ThreadPoolExecutor(max(len(receivers), 1), thread_name_prefix="r1-push") as threads:
        links = [_Attempted(receiver.link()) for receiver in receivers]
        for link in links:
            ending.callback(link.link.close)

        def start(call: Callable[[ServerLink], None]) -> list[Future[None]]:
            return [threads.submit(link.attempt, call) for link in links if link.fault is None]

        def passing() -> Iterator[Bucket]:
            """Send each bucket while it is written; the next is made when all are done with it."""
            for bucket in buckets(known(weights, shapes, first), max_bytes, dtype):
                sending = start(lambda link, bucket=bucket: link.send(bucket))  # type: ignore[misc]
                yield bucket
                wait(sending)

        wait(start(lambda link: link.open()))
        write_buckets(passing(), folder)
        require_same(first, shapes)
        wait(start(lambda link: link.finish(label)))
    return Sent(shapes, tuple(link.fault for link in links))


@dataclass(slots=True)
class _Attempted:
    """A link that is left alone once it has failed, so that it does not hold up the others."""

    link: ServerLink
    fault: Exception | None = None

    def attempt(self, call: Callable[[ServerLink], None]) -> None:
        try:
            call(self.link)
        except Exception as error:  # reported with the other faults
            self.fault = error
            self.link.close()
