"""A rank: one of the processes that train a policy, and a critic, together. Knows nothing of Ray.

`rank_client` calls it. After `load_batch`, calls send only rows of the batch, changed per-token fields and settings,
and return numbers and new per-token fields.
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from r1_cli.build.adapter import AdaptedLearner
from r1_cli.build.algorithm import build_objective
from r1_cli.build.critic import build_critic
from r1_cli.build.reward_model import build_trained
from r1_cli.cluster.batch_transfer import Array, to_array, unpack_samples, update_fields
from r1_cli.cluster.direct import Ask, DirectBackend, Sender, open_sender
from r1_cli.cluster.snapshots import SnapshotWriter
from r1_cli.cluster.weights import spread
from r1_cli.cluster.worker_group import Put, Reference
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import open_model
from r1_cli.train.types import Schedule
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, rounds
from r1_core.learner.critic import Critic
from r1_core.learner.pack import SharedPrompts
from r1_core.learner.parallel import Parallel
from r1_core.learner.trainable import LearnerInfo
from r1_core.objective import Objective
from r1_core.types import PER_TOKEN, Sample, tokens
from r1_rollout.lora import Adapter
from r1_rollout.weights import BucketWriter, Shapes, Weights, buckets

Rows: TypeAlias = range | NDArray[np.int32]  # which samples of the batch
Packed = tuple[str, tuple[Array, str]]  # a tensor by name, as `batch_transfer.to_array` returns it
Build = Callable[[Parallel], tuple[Learner, Objective]]  # each rank builds its own: a user's loss may not pickle
Result = TypeVar("Result")

BUCKET = 256 * 2**20  # bytes of weights that are sent at once


@dataclass(frozen=True, slots=True)
class KLCoef:
    """Stands for the objective in a call: ranks have built all of it except its KL coefficient."""

    value: float


@dataclass(frozen=True, slots=True)
class NewFields:
    """Stands for samples in a result: their new per-token fields, each [T] for the T trained tokens."""

    values: dict[str, Array]


def build_policy(
    config: RunConfig, hardware: Hardware, schedule: Schedule, parallel: Parallel
) -> tuple[Learner, Objective]:
    learner = build_trained(config, hardware, open_model(config), schedule, parallel)
    return learner, build_objective(config)


def build_critic_beside(config: RunConfig, hardware: Hardware, schedule: Schedule, parallel: Parallel) -> Critic:
    return build_critic(config, hardware, open_model(config), schedule, parallel)


class TokenBalance:
    """Tokens that each rank computes, summed over the updates of a step: `perf/straggler` and `global_seqlen`.

    Example: samples of 5, 3 and 2 tokens in micro-batches of one on two ranks: 5 and 3 tokens in the first round, 2 and
    0 in the second. `tokens` are [7, 3], and `straggler` is (5 + 2) / 5.
    """

    def __init__(self, ranks: int) -> None:
        """`ranks` counts those that have samples of their own."""
        self.tokens = [0] * ranks
        self._fullest = 0  # tokens of the fullest rank of each round, for which all wait

    def add(self, samples: Sequence[Sample], batching: Batching) -> None:
        """Add an update of these samples; a shared prompt counts once per micro-batch."""
        padded, share = not batching.padding_free, batching.share_prompts
        work = SharedPrompts.find(samples, share and not padded)
        limit = batching.cap(batching.update)
        for parts in rounds(samples, limit, len(self.tokens), padded=padded, share_prompts=share):
            loads = [work.tokens(part) for part in parts]
            self.tokens = [total + load for total, load in zip(self.tokens, loads, strict=True)]
            self._fullest += max(loads)

    @property
    def straggler(self) -> float:
        """Tokens of the fullest rank in each round, relative to the mean; 1 if nothing was computed."""
        return self._fullest * len(self.tokens) / sum(self.tokens) if sum(self.tokens) else 1.0


class Rank:
    """A process that trains with the others. All ranks are called alike, except for `open_store`.

    `build` makes the learner once the ranks are connected: `partial(build_policy, config, hardware, schedule)`.
    """

    def __init__(
        self,
        build: Build,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        timeout: float = 1800.0,
        shard_size: int = -1,
        sequence_size: int = 1,
        build_critic: Callable[[Parallel], Critic] | None = None,
    ) -> None:
        """Store the settings, without using the device.

        Args:
            timeout: seconds that ranks wait for one another.
            shard_size: ranks that share a copy of the weights, `fsdp.fsdp_size`.
            sequence_size: ranks that share a sequence, `ulysses_size`.
            build_critic: makes the critic after the learner; None: there is none.
        """
        self._build_critic = build_critic
        self._build, self._rank, self._world, self._device = build, rank, world, device
        self._sizes = {"shard_size": shard_size, "sequence_size": sequence_size}
        self._timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None
        self._batch: list[Sample] = []
        self._loads = TokenBalance(1)  # of the batch's updates
        self._weights: Iterator[list[tuple[str, Tensor]]] = iter(())
        self._sender: Sender | None = None  # sends weights directly to engines
        self._snapshots = SnapshotWriter()
        self._copies_folder = Path()

    # --- start -------------------------------------------------------------------------------------------------------

    def open_store(self, host: str) -> tuple[str, int]:
        """Open, on rank 0, the store where ranks connect; return its host and port, which the system chooses."""
        # By default a store listens on every address of the machine.
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host, port, is_master=True, timeout=self._timeout, wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        return host, port

    def join(self, address: tuple[str, int] | None = None) -> None:
        """Connect to the ranks at `open_store`'s address, and build the models; without one, build them alone."""
        parallel = Parallel.single_process(self._device) if self._device == "cuda" else Parallel()
        if address is not None:
            store = self._store or TCPStore(*address, is_master=False, timeout=self._timeout)
            dist.init_process_group(
                "gloo" if self._device == "cpu" else "cpu:gloo,cuda:nccl",
                store=store, rank=self._rank, world_size=self._world, timeout=self._timeout,
            )  # fmt: skip
            parallel = Parallel.join(self._device, **self._sizes, timeout=self._timeout)
        self.learner, self.objective = self._build(parallel)
        if self._build_critic is not None:
            self.learner.offload()
            self.critic = self._build_critic(parallel)
            self.critic.offload()

    def close(self) -> None:
        self._snapshots.wait()
        if self._sender is not None:
            self._sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- samples -----------------------------------------------------------------------------------------------------

    def load_batch(self, columns: Reference) -> None:
        self._batch = unpack_samples(columns.load())
        self._loads = TokenBalance(self.learner.parallel.data_world)

    # --- models ------------------------------------------------------------------------------------------------------

    def call(
        self,
        model: str,
        method: str,
        batch: tuple[Rows, Reference | None] | None,
        arguments: Mapping[str, object],
        catches: tuple[type[Exception], ...] = (),
        trains: bool = False,
    ) -> object:
        """Call a method of the "policy" or the "critic", as `train.trainable.Collective` describes.

        Args:
            batch: rows of the batch to pass as `samples`, and changes to apply before.
            arguments: by name; a `KLCoef` stands for the objective.

        Returns:
            The method's result, with `NewFields` in place of samples, or an error of `catches`.
        """
        sent = {name: self._objective(v) if isinstance(v, KLCoef) else v for name, v in arguments.items()}
        rows, samples = None, []
        if batch is not None:
            rows, samples = batch[0], self._select(*batch)
            sent["samples"] = samples
        try:
            result = getattr(self._model(model), method)(**sent)
        except catches as error:
            return error
        if trains:
            self._loads.add(samples, self.learner.batching)
        if isinstance(result, LearnerInfo):
            loads = tuple(self._loads.tokens) if self._rank == 0 else ()  # the same on every rank, a number for each
            return replace(result, straggler=self._loads.straggler, tokens=loads)
        return result if rows is None else self._pack(rows, samples, result)

    def _model(self, model: str) -> Learner | Critic:
        return self.learner if model == "policy" else self.critic

    def _objective(self, coefficient: KLCoef) -> Objective:
        return replace(self.objective, kl_coef=coefficient.value)

    def _select(self, rows: Rows, changes: Reference | None) -> list[Sample]:
        if changes is not None:
            update_fields(self._batch, changes.load())
        return [self._batch[row] for row in rows]

    def _pack(self, rows: Rows, samples: Sequence[Sample], result: object) -> object:
        if isinstance(result, tuple):
            return tuple(self._pack(rows, samples, part) for part in result)
        if not (isinstance(result, list) and result and isinstance(result[0], Sample)):
            return result
        pairs = list(zip(samples, result, strict=True))
        new = [name for name in PER_TOKEN if any(one.get(name) is not other.get(name) for one, other in pairs)]
        for row, sample in zip(rows, result, strict=True):
            self._batch[row] = sample
        return NewFields({name: tokens(result, name).numpy() for name in new})

    # --- copies for checkpoints --------------------------------------------------------------------------------------

    def take_snapshot(self, model: str, model_only: bool, max_bytes: int | None) -> bool:
        """Copy what this rank would save of a model; return whether that is within `max_bytes`."""
        return self._snapshots.add(model, self._model(model).snapshot(model_only=model_only, max_bytes=max_bytes))

    def set_copies_folder(self, folders: Sequence[Path]) -> None:
        """Let `write_snapshot` write relative folders into this rank's entry: its node's copies in memory."""
        self._copies_folder = folders[self._rank]

    def write_snapshot(self, model: str, folder: Path) -> None:
        self._snapshots.write(model, self._copies_folder / folder)

    def snapshot_error(self, model: str) -> str | None:
        """Return why the copy could not be written; "" once it is written, None before."""
        return self._snapshots.error(model)

    # --- weights -----------------------------------------------------------------------------------------------------

    def run_with_weights(self, task: Callable[[Weights], Result]) -> Result | None:
        """Run a task on the whole weights on rank 0. The others gather to the end, even if it fails."""
        weights, form = self.learner.weights(), self.adapter()
        try:
            return task(weights if form is None else replace(form, weights=weights)) if self._rank == 0 else None
        finally:
            for _ in weights:
                pass

    def spread_weights(self, write: BucketWriter, max_bytes: int, dtype: torch.dtype | None) -> Shapes:
        """Write this rank's buckets of the whole weights; return all shapes by name."""
        return spread(self.learner.shards(dtype), self.learner.parallel, write, max_bytes)

    def adapter(self) -> Adapter | None:
        """Return the trained adapter without its factors; None if all weights are trained."""
        return self.learner.form if isinstance(self.learner, AdaptedLearner) else None

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self.learner.synced_tensors()]

    def send_weights(self, backend: DirectBackend, engines: Reference, dtype: torch.dtype | None) -> None:
        """Send the whole weights, cast to `dtype`, to the engines' processes, and offload.

        Args:
            engines: of a sequence of `Ask`, which rank 0 alone loads.
        """
        if self._sender is None:
            state = self.learner.synced_tensors()
            largest = max(tensor.numel() * (dtype or tensor.dtype).itemsize for _, tensor in state)
            asks: Sequence[Ask] = engines.load() if self._rank == 0 else ()
            self._sender = open_sender(backend, asks, self._rank, partial(self.learner.weights, dtype), largest)
        try:
            self._sender.send()
        except BaseException:
            self._sender.close()
            self._sender = None
            raise
        self.learner.offload()

    def begin_weights(self, dtype: torch.dtype | None) -> None:
        """Begin a pass of `next_weights` over the whole weights, cast to `dtype`."""
        self._weights = buckets(self.learner.weights(dtype), BUCKET)

    def next_weights(self, put: Put | None) -> list[Packed] | Reference | None:
        """Return rank 0's next bucket of whole tensors, or a reference to it; at the end offload and return None."""
        bucket = next(self._weights, None)
        if bucket is None:
            self.learner.offload()
            return None
        if self._rank > 0:
            return []
        packed = [(name, to_array(tensor)) for name, tensor in bucket]
        return put(packed) if put else packed

    def end_weights(self) -> None:
        """Finish an interrupted pass: ranks have to gather together."""
        for _ in self._weights:
            pass
