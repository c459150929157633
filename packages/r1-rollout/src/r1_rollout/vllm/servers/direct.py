"""Direct weight transfer to vLLM servers: vLLM's calls over HTTP, each beside what the server's group sends.

Each server is in a group of its own. In one group for all, a process that dies or hangs would block the others in the
same collective.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import torch

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.transports.direct import Bucket, Link
from r1_rollout.transports.folder import write_buckets
from r1_rollout.transports.groups import NcclGroup, ProcessGroup, TcpGroup
from r1_rollout.types import Json, JsonObject
from r1_rollout.vllm.client import Endpoint, ServerFault, ServerRejected, ServerStalled, ask
from r1_rollout.vllm.servers.server import require_settings
from r1_rollout.weights import Shapes, Weights, buckets, known, require_same

Backend: TypeAlias = Literal["nccl", "r1_tcp"]  # of vLLM's weight transfer: between GPUs, or between CPUs


@dataclass(frozen=True, slots=True)
class ServerReceiver:
    name: str  # for messages
    endpoint: Endpoint
    backend: Backend  # that the server was started with in `--weight-transfer-config`
    seconds: float  # that the server may take in all; the time it waits for others does not count

    def link(self) -> "HttpLink":
        return HttpLink(self)


class HttpLink:
    """The sender's end of a transfer to a server, and its group's `WeightSyncClient`. Failures raise ServerFault."""

    def __init__(self, receiver: ServerReceiver) -> None:
        self._name, self._endpoint, self._backend = receiver.name, receiver.endpoint, receiver.backend
        self._left = receiver.seconds
        self._link: Link | None = None

    def open(self) -> None:
        with self._named_faults():
            address = urlsplit(self._endpoint.url)
            if address.scheme == "unix" and not Path(address.path).exists():
                raise ServerFault(
                    "it is not on the machine of the process that has the weights, or has ended: where these may be on "
                    "different machines, send weights in a folder, or give servers by their addresses"
                )
            begun = self._call_workers("r1_begin")
            if any(one != {"backend": self._backend} for one in begun):
                option = f'--weight-transfer-config={{"backend": "{self._backend}"}}'
                raise ServerRejected(f"it must be started with {option}; its workers answer {begun}")
            size = self._call("/get_world_size", method="GET")
            workers = size.get("world_size") if isinstance(size, dict) else None
            if not isinstance(workers, int) or workers < 1:
                raise ServerFault(f"asked for its number of workers, it answers {size}")
            self._link = Link(self, self._make_group(workers), lambda: max(self._left, 1.0))
            self._link.open()
            self.start_weight_update()

    def _make_group(self, workers: int) -> ProcessGroup:
        try:
            if self._backend == "nccl":
                return NcclGroup(workers, torch.device("cuda", 0), self._left)
            return TcpGroup(own_address(self._endpoint), workers, self._left)
        except (
            OSError,
            ImportError,
            RuntimeError,
            AssertionError,
        ) as error:  # no route to it; no NCCL or GPU
            raise ServerFault(f"no group over {self._backend} could be made here: {error}") from error

    def send(self, bucket: Bucket) -> None:
        assert self._link is not None
        with self._named_faults():
            self._link.send(bucket)

    def finish(self, label: str) -> None:
        with self._named_faults():
            self.finish_weight_update()
            held = self._call_workers("r1_commit", version=label)
            if any(one != {"version": label} for one in held):
                raise ServerFault(f"it has {held}, not {label}")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    # The `WeightSyncClient` of the group.

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        self._call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("/start_weight_update")

    def update_weights(self, update_info: Json) -> None:
        self._call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("/finish_weight_update")

    def _call_workers(self, method: str, **arguments: str) -> list[Json]:
        answer = self._call("/collective_rpc", {"method": method, "kwargs": arguments})
        if not isinstance(answer, dict) or not answer.get("results"):
            raise ServerFault(f"no worker answers {method}, but {answer}")
        return list(answer["results"])

    def _call(self, path: str, body: Mapping[str, Json] | None = None, method: str = "POST") -> Json:
        if self._left <= 0:
            raise ServerStalled("it did not take the weights in time")
        began = time.monotonic()
        try:
            return ask(self._endpoint, method, path, body, timeout=self._left)
        finally:
            self._left -= time.monotonic() - began

    @contextmanager
    def _named_faults(self) -> Iterator[None]:
        try:
            with require_settings(self._name):
                yield
        except ServerFault as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raise type(error)(f"{self._name}: {error}{notes}") from error
        except TimeoutError as error:
            raise ServerStalled(f"{self._name}: {error}") from error
        except Exception as error:
            name = type(error).__name__
            raise ServerFault(f"{self._name}: its weights could not be sent: {name}: {error}") from error


def own_address(server: Endpoint) -> str:
    """Return this machine's address on the route to a server. Raises OSError if there is no route."""
    if not server.remote:
        return "127.0.0.1"
    family, kind, _, _, there = socket.getaddrinfo(urlsplit(server.url).hostname, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class Sent:
    shapes: Shapes
    faults: tuple[Exception | None, ...]  # of each receiver; None: it has the weights


def push(
    weights: Weights,
    receivers: Sequence[ServerReceiver],
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

        def start(call: Callable[[HttpLink], None]) -> list[Future[None]]:
            return [threads.submit(link.attempt, call) for link in links if link.fault is None]

        def passing() -> Iterator[Bucket]:
            """Send each bucket while it is written."""
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
    link: HttpLink
    fault: Exception | None = None

    def attempt(self, call: Callable[[HttpLink], None]) -> None:
        try:
            call(self.link)
        except Exception as error:  # reported with the other faults
            self.fault = error
            self.link.close()
