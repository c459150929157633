"""A process group over TCP for weights on processors: one sender at rank 0, and the workers of one server.

It is to processors what a NCCL communicator is to GPUs, with what the collectives of gloo lack: a group joins only who
knows its secret, which travels over the server's guarded HTTP; every wait has a deadline; and closing it ends whatever
waits. Bytes cross as they lie in memory, so both ends must have the same byte order.
"""

import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from r1_rollout.vllm.client import Endpoint

_SECRET = 64  # characters of the secret, and so bytes of a greeting


def own_address(server: Endpoint) -> str:
    """Return this machine's address on the way to a server: the loopback's for a server of this machine.

    Raises:
        OSError: there is no way to the server's host.
    """
    if not server.remote:
        return "127.0.0.1"
    family, kind, _, _, there = socket.getaddrinfo(urlsplit(server.url).hostname, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


class TcpSender:
    """The sender's end. `connect` and `send` are called from one thread, `destroy` from any."""

    def __init__(self, address: str, workers: int, seconds: float) -> None:
        """Listen on a free port of `address` for as many workers, each of which may keep it waiting for `seconds`."""
        self._workers = workers
        self._seconds = seconds
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=workers + 8)
        self._secret = secrets.token_hex(_SECRET // 2)
        self._sockets: list[socket.socket] = []
        self._ended = False
        self.init_info: dict[str, Any] = {
            "address": address,
            "port": self._listener.getsockname()[1],
            "secret": self._secret,
            "seconds": seconds,
        }

    def connect(self) -> None:
        """Wait for all workers; whoever does not know the secret is turned away.

        Raises:
            OSError: they were not there in time, or `destroy` was called.
        """
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
        """Send the tensors, in order, to every worker.

        Raises:
            OSError: a worker is gone or takes nothing, or `destroy` was called.
        """
        for tensor in tensors:
            content = _bytes(tensor.to("cpu").contiguous())
            for worker in self._sockets:
                worker.sendall(content)

    def destroy(self) -> None:
        """End the group; a thread that waits in it gets OSError."""
        self._ended = True
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class TcpReceiver:
    """A worker's end, with as much of a communicator's interface as a weight-transfer engine of vLLM uses."""

    def __init__(self, address: str, port: int, secret: str, seconds: float) -> None:
        """Join the group. Raises OSError if the sender cannot be reached."""
        try:
            self._socket = socket.create_connection((address, port), timeout=seconds)
            self._socket.sendall(secret.encode())
        except OSError as error:
            raise OSError(f"the sender of weights does not answer at {address} port {port}: {error}") from error

    def receive(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor in main memory. Raises OSError if the sender is gone or silent for too long."""
        _receive(self._socket, _bytes(tensor))

    def destroy(self) -> None:
        """Leave the group."""
        self._socket.close()


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
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
