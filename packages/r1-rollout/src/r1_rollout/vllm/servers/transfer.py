"""One server's way to receive weights by broadcast: vLLM's calls in their order, each beside what the group sends.

Every server has a group of its own. In one group for all, a process that dies or hangs leaves the others waiting in the
same collective, from which on GPUs only the end of the process frees them.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch

from r1_rollout.vllm.client import Endpoint, RequestRefused, ServerFault, ServerRejected, ServerStalled, ask
from r1_rollout.vllm.nccl_group import NcclSender
from r1_rollout.vllm.sending.group import Group
from r1_rollout.vllm.servers.broadcast import Bucket
from r1_rollout.vllm.tcp_group import TcpSender, own_address

Backend: TypeAlias = Literal["nccl", "r1_tcp"]  # of vLLM's weight transfer: GPUs to GPUs, or anything to processors


class Transfer:
    """From a server's first word to its last in one push. Any failure raises ServerFault or RequestRefused."""

    def __init__(self, name: str, endpoint: Endpoint, backend: Backend, seconds: float) -> None:
        """Prepare; entering the block opens it.

        Args:
            name: for messages.
            backend: what the server was started with in `--weight-transfer-config`.
            seconds: that the server may take in all; the time it waits for others does not count.
        """
        self._name = name
        self._endpoint = endpoint
        self._backend = backend
        self._left = seconds
        self._group: Group | None = None

    def __enter__(self) -> "Transfer":
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.destroy()

    def _open(self) -> None:
        begun = self._results("r1_begin")
        if any(one != {"backend": self._backend} for one in begun):
            wanted = f'--weight-transfer-config={{"backend": "{self._backend}"}}'
            raise ServerRejected(f"{self._name} must be started with {wanted}; its workers say {begun}")
        size = self._call("/get_world_size", None, "GET")
        workers = size.get("world_size") if isinstance(size, dict) else None
        if not isinstance(workers, int) or workers < 1:
            raise ServerFault(f"{self._name}: asked how many workers it has, it says {size}")
        self._group = group = self._make_group(workers)
        self._call_beside("/init_weight_transfer_engine", {"init_info": group.init_info}, group, group.connect)
        self._call("/start_weight_update", None)

    def _make_group(self, workers: int) -> Group:
        try:
            if self._backend == "nccl":
                return NcclSender(workers, torch.device("cuda", 0), self._left)
            return TcpSender(own_address(self._endpoint), workers, self._left)
        except (OSError, ImportError, RuntimeError, AssertionError) as error:  # no way to its host; no NCCL or GPU here
            raise ServerFault(f"{self._name}: no group over {self._backend} could be made here: {error}") from error

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; returns when every worker has loaded it."""
        info = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
        }
        group, tensors = self._group, [tensor for _, tensor in bucket]
        assert group is not None
        self._call_beside("/update_weights", {"update_info": info}, group, lambda: group.send(tensors))

    def finish(self, label: str) -> None:
        """Close the update; returns when every worker says that it holds the weights `label`."""
        self._call("/finish_weight_update", None)
        held = self._results("r1_commit", version=label)
        if any(one != {"version": label} for one in held):
            raise ServerFault(f"{self._name} took {held}, not {label}")

    def _results(self, method: str, **arguments: str) -> list[Any]:
        """Return what each worker answers to a call of `WeightReceiver`."""
        answer = self._call("/collective_rpc", {"method": method, "kwargs": arguments})
        if not isinstance(answer, dict) or not answer.get("results"):
            raise ServerFault(f"{self._name}: no worker answers {method}, but {answer}")
        return list(answer["results"])

    def _call(self, path: str, body: Mapping[str, Any] | None, method: str = "POST") -> Any:
        """Return the server's answer, and count the time it took."""
        if self._left <= 0:
            raise ServerStalled(f"{self._name} did not take the weights in time")
        began = time.monotonic()
        try:
            return ask(self._endpoint, method, path, body, timeout=self._left)
        finally:
            self._left -= time.monotonic() - began

    def _call_beside(self, path: str, body: Mapping[str, Any], group: Group, what: Callable[[], None]) -> None:
        """Make a call that the server answers when `what` has been done with the group here."""
        side = _Side(what, group)
        try:
            self._call(path, body)
        except (ServerFault, RequestRefused) as error:
            group.destroy()
            raise type(error)(f"{self._name}: {error}{side.said()}") from error
        side.join(self._left, self._name)


class _Side:
    """What runs here while a server is asked. If it fails the group is ended, lest the server wait in it for ever."""

    def __init__(self, what: Callable[[], None], group: Group) -> None:
        self._what, self._group = what, group
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="r1-broadcast")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._what()
        except Exception as error:  # reported by `said` or `join`
            self._error = error
            self._group.destroy()

    def said(self) -> str:
        """Return what went wrong here, for the message of what went wrong there."""
        return f" (here: {type(self._error).__name__}: {self._error})" if self._error else ""

    def join(self, seconds: float, name: str) -> None:
        """Wait for the end. Raises ServerFault if it failed or does not end."""
        self._thread.join(max(seconds, 1.0))
        if self._thread.is_alive():
            raise ServerStalled(f"{name} says that it has weights which are still being sent")
        if self._error is not None:
            raise ServerFault(f"{name}: the weights could not be sent{self.said()}") from self._error
