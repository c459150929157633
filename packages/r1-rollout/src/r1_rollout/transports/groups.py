"""Process groups for direct weight transfer: the sender at rank 0, and the workers of engines.

`NcclGroup` is for GPUs, where it has NEVER RUN: it follows the public API of vLLM 0.32, and tests check the order of
the calls; the workers' end is vLLM's engine `nccl`. `TcpGroup` is for CPUs: a group that only a process with its secret
can join, whose every wait has a deadline, and whose end releases whatever waits, none of which gloo offers.
"""

import base64
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from r1_rollout.types import JsonObject

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

_SECRET = 64  # characters of the secret, and bytes of a greeting


class ProcessGroup(Protocol):
    """The sender's end. `connect` and `send` are called from one thread, `destroy` from any."""

    init_info: JsonObject  # what the workers need to know to join

    def connect(self) -> None:
        """Wait until all workers have joined. Raises OSError (TimeoutError) if they have not in time."""

    def send(self, tensors: list[Tensor]) -> None:
        """Send the tensors, in order, to all workers. Raises OSError if one is gone."""

    def destroy(self) -> None:
        """End the group; a waiting thread gets an error."""


class NcclGroup:
    """A NCCL communicator. Its id, which admits a process, goes over guarded HTTP or Ray; no store is opened for it."""

    def __init__(self, workers: int, device: torch.device, seconds: float) -> None:
        """Make the id of a group of this process and `workers` others.

        Args:
            seconds: how long `connect` waits for them.
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._world_size, self._device, self._seconds = workers + 1, device, seconds
        self._stream = torch.cuda.Stream(device)
        self._id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._lock = threading.Lock()
        self._communicator: PyNcclCommunicator | None = None
        self._error: Exception | None = None
        self._over = False
        self.init_info: JsonObject = {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._world_size,
        }

    def connect(self) -> None:
        # NCCL itself waits for ever. At the deadline its thread is left alone, and ends the group if it connects later.
        thread = threading.Thread(target=self._join, daemon=True, name="r1-nccl")
        thread.start()
        thread.join(self._seconds)
        if self._error is not None:
            raise self._error
        if thread.is_alive():
            self.destroy()
            raise TimeoutError(
                f"not all of {self._world_size - 1} workers joined the NCCL group in {self._seconds:g} s"
            )

    def _join(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        try:
            communicator = uid_init_process_group(self._id, 0, self._world_size, self._device)
        except Exception as error:  # raised by `connect`, if it still waits
            self._error = error
            return
        with self._lock:
            self._communicator = communicator
            if self._over:
                communicator.destroy()

    def send(self, tensors: Iterable[Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                assert self._communicator is not None
                copy = tensor.to(self._device).contiguous()
                self._communicator.broadcast(copy, src=0, stream=self._stream)
        self._stream.synchronize()

    def destroy(self) -> None:
        with self._lock:
            if self._communicator is not None and not self._over:
                self._communicator.destroy()  # aborts what is in flight
            self._over = True


class TcpGroup:
    """A group over TCP. Bytes are sent as they lie in memory, so both ends must have the same byte order."""

    def __init__(self, address: str, workers: int, seconds: float) -> None:
        """Listen on a free port of `address`. `seconds`: how long to wait for each worker."""
        self._workers, self._seconds = workers, seconds
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=workers + 8)
        self._secret = secrets.token_hex(_SECRET // 2)
        self._sockets: list[socket.socket] = []
        self._ended = False
        self.init_info: JsonObject = {
            "address": address,
            "port": self._listener.getsockname()[1],
            "secret": self._secret,
            "seconds": seconds,
        }

    def connect(self) -> None:
        deadline = time.monotonic() + self._seconds
        while len(self._sockets) < self._workers:
            self._listener.settimeout(_left(deadline))
            caller, _ = self._listener.accept()
            caller.settimeout(min(10.0, _left(deadline)))
            greeting = bytearray(_SECRET)
            with suppress(OSError):
                _receive(caller, memoryview(greeting))
            if not secrets.compare_digest(bytes(greeting), self._secret.encode()):
                caller.close()
                continue
            caller.settimeout(self._seconds)
            self._sockets.append(caller)
            if self._ended:  # `destroy` may have looked before this one was there
                self.destroy()
                raise ConnectionError("the group was ended")
        self._listener.close()

    def send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            content = _bytes(tensor.to("cpu").contiguous())
            for worker in self._sockets:
                worker.sendall(content)

    def destroy(self) -> None:
        self._ended = True
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class TcpReceiver:
    """A worker's end of a `TcpGroup`, in vLLM's communicator interface."""

    def __init__(self, address: str, port: int, secret: str, seconds: float) -> None:
        try:
            self._socket = socket.create_connection((address, port), timeout=seconds)
            self._socket.sendall(secret.encode())
        except OSError as error:
            raise OSError(f"the sender of weights does not answer at {address} port {port}: {error}") from error

    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor in main memory. Raises OSError if the sender is gone or silent for too long."""
        _receive(self._socket, _bytes(tensor))

    def destroy(self) -> None:
        self._socket.close()


def _bytes(tensor: Tensor) -> memoryview:
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _receive(source: socket.socket, target: memoryview) -> None:
    while target:
        count = source.recv_into(target)
        if not count:
            raise ConnectionError("the connection was closed in the middle of the weights")
        target = target[count:]


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("the workers did not come in time")
    return left


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
