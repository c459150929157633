"""The bytes of a broadcast, where the weights are: to every server at once, each by a lane of its own."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.vllm.client import Endpoint, ServerFault
from r1_rollout.vllm.servers.broadcast import Broadcast, BrokenOff, Bucket, Subscriber
from r1_rollout.vllm.servers.server import must_be_fit
from r1_rollout.vllm.servers.transfer import Backend, Transfer
from r1_rollout.vllm.shapes import known, require_same
from r1_rollout.vllm.shards import write_buckets
from r1_rollout.weight_source import Shapes
from r1_rollout.weights import Weights, buckets


@dataclass(frozen=True, slots=True)
class Lane:
    """One server as whoever sends it weights sees it: who it is and where, by which way, in how many seconds."""

    name: str
    endpoint: Endpoint
    backend: Backend
    seconds: float

    def send(self, parts: Iterable[Bucket], label: str) -> None:
        """Give the server full weights, called `label`.

        Raises:
            ServerFault: it has not taken them, for whatever reason.
            BrokenOff: `parts` ended early. What the server has then is of no version.
        """
        address = urlsplit(self.endpoint.url)
        if address.scheme == "unix" and not Path(address.path).exists():
            raise ServerFault(
                f"{self.name} is not on the machine of the process that has the weights, or has ended: "
                "where these may be apart, hand weights over in a folder, or give servers by their addresses"
            )
        with must_be_fit(self.name), Transfer(self.name, self.endpoint, self.backend, self.seconds) as transfer:
            for bucket in parts:
                transfer.send(bucket)
            transfer.finish(label)


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of a broadcast."""

    shapes: Shapes
    faults: tuple[ServerFault | None, ...]  # of each lane; None: its server has the weights


def send_all(
    weights: Weights,
    lanes: Sequence[Lane],
    *,
    label: str,
    folder: Path,
    max_bytes: int,
    dtype: torch.dtype | None,
    first: Shapes,
) -> Sent:
    """Send full weights over all lanes in one pass, and write them into a new `folder` for servers that fail meanwhile.

    To be run where the weights are.

    Args:
        label: what the weights are called from now on.
        max_bytes: of a bucket; one is in memory at a time, and none leaves before all lanes have taken it.
        dtype: what floating-point tensors are cast to; None: they are left as they are.
        first: the shapes of the first weights, which these must have, too; empty if these are the first.

    Raises:
        WeightsError: these are not the weights that came first; no server calls them by the label.
        OSError: the folder cannot be written.
    """
    if isinstance(weights, Adapter):
        raise WeightsError("an adapter is not broadcast: servers take it up from a folder")
    broadcast, shapes = Broadcast(), Shapes()
    with ThreadPoolExecutor(max(len(lanes), 1), thread_name_prefix="r1-lane") as threads:
        sending = [threads.submit(_follow, lane, broadcast.join(), label) for lane in lanes]
        try:
            parts = buckets(known(weights, shapes, first), max_bytes, dtype)
            write_buckets(broadcast.through(parts), folder)
            require_same(first, shapes)
        except BaseException:
            broadcast.end(broken=True)
            raise
        broadcast.end()
    return Sent(shapes, tuple(map(_fault, lanes, sending)))


def _follow(lane: Lane, subscriber: Subscriber, label: str) -> None:
    """Send one server its weights; whatever becomes of it, the others wait for it no longer."""
    with subscriber:
        lane.send(subscriber, label)


def _fault(lane: Lane, sending: "Future[None]") -> ServerFault | None:
    """Return what a server failed at; what is no fault of a server as one, for it must be able to travel."""
    error = sending.exception()
    if error is None or isinstance(error, ServerFault):
        return error
    assert not isinstance(error, BrokenOff)  # the pass has ended well
    return ServerFault(f"{lane.name}: its weights could not be sent: {type(error).__name__}: {error}")
