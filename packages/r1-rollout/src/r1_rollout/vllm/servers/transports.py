"""The transports of weights to the servers of a pool: through a folder, directly, or an adapter alone."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from r1_rollout.transports import adapter, folder
from r1_rollout.transports.folder import PushedWeights
from r1_rollout.vllm.servers.direct import push
from r1_rollout.vllm.servers.pooled_server import PooledServer
from r1_rollout.weights import Shapes, WeightSource, require_same


@dataclass(slots=True)
class FolderTransport:
    """Writes full weights where they are, then lets every server load them.

    Args:
        target: with a new folder.
        max_bytes: of a file or bucket, and of what a process holds in memory beside the model.
        first: shapes of the first weights, which these must have, too; empty before them.
    """

    target: PushedWeights
    max_bytes: int
    dtype: torch.dtype | None = None
    first: Shapes = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)  # of what was sent

    def send(self, source: WeightSource, members: Sequence[PooledServer]) -> Sequence[Exception | None]:
        self.shapes = folder.write_source(source, self.target.folder, self.max_bytes, self.dtype)
        self.target.tensors = len(self.shapes)
        require_same(self.first, self.shapes)
        return load_all(members, self.target)


@dataclass(slots=True)
class DirectTransport(FolderTransport):
    """Sends full weights from the process that has them, and writes them for servers that fail."""

    def send(self, source: WeightSource, members: Sequence[PooledServer]) -> Sequence[Exception | None]:
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


@dataclass(frozen=True, slots=True)
class AdapterTransport:
    target: PushedWeights  # with a folder that does not exist yet

    def send(self, source: WeightSource, members: Sequence[PooledServer]) -> Sequence[Exception | None]:
        self.target.tensors = len(adapter.write_source(source, self.target.folder))
        return load_all(members, self.target)


def load_all(members: Sequence[PooledServer], weights: PushedWeights) -> list[Exception | None]:
    def attempt(member: PooledServer) -> Exception | None:
        try:
            member.load(weights)
        except Exception as error:  # reported with the other faults
            return error
        return None

    with ThreadPoolExecutor(max(len(members), 1), thread_name_prefix="r1-load") as threads:
        return list(threads.map(attempt, members))
