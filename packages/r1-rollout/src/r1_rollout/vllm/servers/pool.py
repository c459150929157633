"""A pool of vLLM servers: load-balanced, restarted after failures, never out of date."""

import shutil
import uuid
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.pool.pool import EnginePool
from r1_rollout.private_folder import PrivateFolder
from r1_rollout.transports.folder import PushedWeights, count_tensors
from r1_rollout.types import PromptLike, SamplingParams
from r1_rollout.vllm.client import Endpoint
from r1_rollout.vllm.limits import require_temperature
from r1_rollout.vllm.servers.direct import Backend
from r1_rollout.vllm.servers.pooled_server import Deadlines, PooledServer
from r1_rollout.vllm.servers.server import LocalServer
from r1_rollout.vllm.servers.supervisor import Supervisor
from r1_rollout.vllm.servers.transports import AdapterTransport, DirectTransport, FolderTransport
from r1_rollout.weight_checks import TOLERANCE
from r1_rollout.weights import Shapes, WeightSource, require_newer

if TYPE_CHECKING:
    from r1_rollout.types import Tokens


class ServerPool(EnginePool[PooledServer]):
    """A `Generator` over servers that it starts (`LocalServer`) or is given (`Endpoint`).

    Full weights are sent through a folder of safetensors files, or directly; the folder then serves servers that fail
    meanwhile. Adapters are always sent through the folder. A server takes requests only after its workers have reported
    the current weights, and every answer must name them. Servers do not sleep: they have GPUs of their own.
    """

    def __init__(
        self,
        servers: Sequence[LocalServer | Endpoint],
        *,
        end_token_ids: Collection[int],
        banned_token_ids: Collection[int] = (),
        max_sequences: int = 256,
        max_attempts: int = 5,
        max_restarts: int = 3,
        deadlines: Deadlines | None = None,
        folder: Path | None = None,
        bucket_bytes: int = 2**28,
        dtype: torch.dtype | None = None,
        broadcast: Backend | None = None,
        base: Path | None = None,
    ) -> None:
        """Take over the servers; the first sync starts them, all at the same time.

        Args:
            servers: those to start, and the addresses of those that run (see `server.REQUIRED` for their options).
            max_sequences: samples that a server works on at the same time; its own `max_num_seqs`.
            max_attempts: servers that a group is tried on before the call fails.
            max_restarts: failed starts in a row after which a server is given up.
            folder: where weights are written. Every server must see it, unless they are sent by `broadcast` and are no
                adapters. None: the machine's temporary folder.
            bucket_bytes: what a sync holds in memory beside the model.
            dtype: precision in which weights are sent; None: the learner's.
            broadcast: send weights directly: `nccl` to servers on GPUs, from this process's first, `r1_tcp` to servers
                on CPUs, which need `--weight-transfer-config={"backend": …}` with the same word. None: through the
                folder.
            base: a Hugging Face folder with the base weights of adapters, which every server reads by itself; None:
                full weights have to come before the first adapter.

        Raises:
            ValueError: there is no server, or an end token is banned.
        """
        deadlines = deadlines or Deadlines()
        options = deadlines, end_token_ids, banned_token_ids, broadcast
        self._supervisor = Supervisor(_pool_servers(servers, *options), deadlines, max_restarts)
        # The servers keep weights in the precision that they were sent in, or in float32 where that is their own.
        precisions = sorted({str(dtype or torch.float32).removeprefix("torch."), "float32"})
        super().__init__(
            self._supervisor, max_sequences=max_sequences, max_attempts=max_attempts, precisions=precisions
        )
        if dtype is None:  # the servers' own, which is unknown here
            self.tolerance = TOLERANCE[torch.bfloat16]
        self._folder = PrivateFolder("r1-weights-", folder)
        self._root = self._folder.path / "pushes"
        self._root.mkdir()
        self._bucket_bytes, self._dtype, self._broadcast = bucket_bytes, dtype, broadcast
        self._shapes: Shapes = {}  # of the first full weights that were loaded
        self._base = _base_weights(base) if base else None
        self._version: int | None = None
        self._latest = -1  # the newest version that servers have had

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._end("the pool was closed")
        self._supervisor.close()
        self._folder.remove()

    def _check_version(self, version: int) -> None:
        require_newer(version, self._latest)

    def _sync(self, source: WeightSource, *, activate: bool) -> None:
        self._version, label = None, f"{source.version}-{uuid.uuid4().hex[:12]}"
        before, weights = self._supervisor.current, PushedWeights(self._root / label, label, source.version)
        try:
            if isinstance(source.names(), Adapter):
                self._sync_adapter(source, weights)
            else:
                kind = DirectTransport if self._broadcast else FolderTransport
                transport = kind(weights, self._bucket_bytes, self._dtype, self._shapes)
                self._supervisor.sync(weights, partial(transport.send, source))
                self._shapes, self._base = transport.shapes, weights
        finally:
            self._remove_unused(before)
        self._version = self._latest = source.version

    def _sync_adapter(self, source: WeightSource, weights: PushedWeights) -> None:
        if self._base is None:
            raise WeightsError("an adapter came before the full weights that it is added to: push those first")
        weights.base = self._base
        self._supervisor.sync(weights, partial(AdapterTransport(weights).send, source))

    def _remove_unused(self, before: PushedWeights | None) -> None:
        """Remove weights that no server will load again. The last adapter may still have a cancelled request."""
        current = self._supervisor.current
        last = before if before and before.base else None
        kept = {one.folder for one in (current, current and current.base, self._base, last) if one}
        for folder in set(self._root.iterdir()) - kept:
            shutil.rmtree(folder, ignore_errors=True)

    def _require_active(self, what: str) -> None:
        if self._version is None or self._supervisor.current is None or not (self._inside or self._stays_ready):
            raise RuntimeError(f"{what}() needs an active pool: call it inside `with pool.active(source)`")

    def _check_sampling(self, prompts: Sequence[PromptLike], params: SamplingParams) -> None:
        require_temperature(params.temperature)
        self._require_fit(prompts, [()] * len(prompts), params.max_tokens)
        for server in self._ready() if params.stop else ():
            server.require_tokenizer()

    def _check_replay(self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float) -> None:
        require_temperature(temperature)
        self._require_fit(prompts, responses, 0)

    def _require_fit(self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", max_tokens: int) -> None:
        with self._supervisor.changed:
            found = {server.limits for server in self._supervisor.servers if server.limits}
        for prompt, response in zip(prompts, responses, strict=True):
            for limits in found:
                limits.require(prompt, max(len(response), max_tokens), response)


def _base_weights(folder: Path) -> PushedWeights:
    return PushedWeights(folder, f"base-{uuid.uuid4().hex[:12]}", -1, tensors=count_tensors(folder))


def _pool_servers(
    servers: Sequence[LocalServer | Endpoint],
    deadlines: Deadlines,
    end_token_ids: Collection[int],
    banned_token_ids: Collection[int],
    broadcast: Backend | None,
) -> list[PooledServer]:
    if not servers:
        raise ValueError("a pool needs at least one server: one to start, or the address of one")
    if both := sorted({*end_token_ids} & {*banned_token_ids}):
        raise ValueError(f"tokens {both} are both end tokens and banned: answers could not end")
    options = deadlines, end_token_ids, banned_token_ids, broadcast
    return [
        PooledServer(one.name, None, one, *options)
        if isinstance(one, LocalServer)
        else PooledServer(one.url, one, None, *options)
        for one in servers
    ]
