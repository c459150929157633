"""A pool of vLLM servers as one engine: balanced by the tokens they owe, mended when they fail, never out of date."""

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.types import Completion, PromptLike, SamplingParams
from r1_rollout.vllm.adapter import write_adapter
from r1_rollout.vllm.client import Call, Endpoint, NotThere, ServerFault, ask, stream
from r1_rollout.vllm.servers.broadcast import Bucket
from r1_rollout.vllm.servers.dispatch import Dispatch, FinishedGroups
from r1_rollout.vllm.servers.pooled_server import PooledServer, PushedWeights
from r1_rollout.vllm.servers.protocol import GENERATE, generate_body, read_group, read_replay, replay_body
from r1_rollout.vllm.servers.server import LocalServer
from r1_rollout.vllm.servers.supervisor import Deadlines, Supervisor
from r1_rollout.vllm.servers.transfer import Backend
from r1_rollout.vllm.shards import write_buckets
from r1_rollout.weights import Weights, buckets

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

log = logging.getLogger("r1")

flatten = chain.from_iterable
_DISAGREEMENT = 0.2  # nats; half precision in another batch moves a log-prob by less


class ServerPool:
    """A `Generator` over servers that it starts (`LocalServer`) or is given (`Endpoint`).

    Full weights go over a folder of safetensors files, or by broadcast to the servers' workers; the folder then serves
    a server that fails meanwhile or later. Adapters always go over the folder. A server takes requests only after its
    workers have said that they hold the current weights, and every answer must name them.

    Servers do not sleep between two `awake` blocks: they are meant to have GPUs of their own, which nobody else waits
    for. Only an engine on the learner's own GPUs (`VllmEngine`) gains by letting go of its memory.
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
    ) -> None:
        """Take over the servers; they are started, side by side, by the first `awake`.

        Args:
            servers: those to start, and the addresses of those that run (see `server.REQUIRED` for their options).
            end_token_ids: tokens that end an answer.
            banned_token_ids: tokens that are never sampled, such as the placeholders of pictures.
            max_sequences: samples that a server works on at the same time; its own `max_num_seqs`.
            max_attempts: servers that a group is tried on before the call fails.
            max_restarts: failed starts in a row after which a server is given up.
            deadlines: how long to wait for what; None: the defaults of `Deadlines`.
            folder: where weights are written, on a disk that every server sees, or with `broadcast`, but for adapters,
                any disk of this machine; None: the machine's temporary folder.
            bucket_bytes: what a push holds in memory beside the model.
            dtype: precision in which weights are sent; None: the learner's.
            broadcast: send the weights over process groups instead: `nccl` to servers on GPUs, from the first that
                this process sees, `r1_tcp` to servers on processors. The servers need
                `--weight-transfer-config={"backend": …}` with the same word. None: over the folder.

        Raises:
            ValueError: there is no server, or an end token is banned.
        """
        if not servers:
            raise ValueError("a pool needs at least one server: one to start, or the address of one")
        if both := sorted({*end_token_ids} & {*banned_token_ids}):
            raise ValueError(f"tokens {both} are both end tokens and banned: answers could not end")
        pooled = [
            PooledServer(one.name, None, one) if isinstance(one, LocalServer) else PooledServer(one.url, one, None)
            for one in servers
        ]
        self._supervisor = Supervisor(pooled, deadlines or Deadlines(), max_restarts, broadcast)
        self._ends, self._banned = frozenset(end_token_ids), frozenset(banned_token_ids)
        self._max_sequences, self._max_attempts = max_sequences, max_attempts
        self._root = Path(tempfile.mkdtemp(prefix="r1-weights-", dir=folder))  # mode 0700
        self._bucket_bytes, self._dtype, self._broadcast = bucket_bytes, dtype, broadcast
        self._shapes: dict[str, list[int]] | None = None  # of the first full weights that were taken
        self._base: PushedWeights | None = None
        self._version: int | None = None
        self._dispatch: Dispatch | None = None

    def __enter__(self) -> "ServerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the servers that were started here, and remove the weights from the disk."""
        self._end_dispatch()
        self._supervisor.close()
        shutil.rmtree(self._root, ignore_errors=True)

    @contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator[None]:
        """Push `weights` to all servers, sample inside the block; at its end unfinished requests are broken off.

        Args:
            weights: all weights, or an `Adapter` alone, if the servers were started with `enable_lora` and
                `max_lora_rank`. An adapter stands on the full weights that came last.
            version: the step's number, for the completions.

        Raises:
            RuntimeError: the pool is awake already.
            WeightsError: these are not the servers' model's weights: names or shapes differ from those of the first
                push, or all servers reject them; or an adapter is empty, binds to nothing, or came first.
            ServersLost: no server is there to take the weights.
        """
        if self._version is not None:
            raise RuntimeError(f"the pool is awake already, with weight version {self._version}")
        self._push(weights, version)
        self._version = version
        try:
            yield
        finally:
            self._version = None
            self._end_dispatch()

    def _push(self, weights: Weights, version: int) -> None:
        label = f"{version}-{uuid.uuid4().hex[:12]}"
        before, folder = self._supervisor.current, self._root / label
        try:
            if isinstance(weights, Adapter):
                self._supervisor.push(self._write_adapter(weights, folder, label))
            else:
                self._push_full(weights, folder, label)
        finally:
            self._sweep(before)

    def _push_full(self, weights: Iterable[tuple[str, torch.Tensor]], folder: Path, label: str) -> None:
        parts = buckets(weights, self._bucket_bytes, self._dtype)
        shapes: dict[str, list[int]] = {}

        def write(parts: Iterable[Bucket]) -> PushedWeights:
            shapes.update(write_buckets(parts, folder))
            _compare(self._shapes or shapes, shapes)
            return PushedWeights(folder, label, len(shapes))

        if self._broadcast:
            known = _known(parts, self._shapes)
            current = self._supervisor.broadcast(label, lambda broadcast: write(broadcast.through(known)))
        else:
            current = write(parts)
            self._supervisor.push(current)
        self._shapes, self._base = shapes, current

    def _write_adapter(self, adapter: Adapter, folder: Path, label: str) -> PushedWeights:
        if self._base is None:
            raise WeightsError("an adapter came before the full weights that it stands on: push those first")
        folder.mkdir()
        try:
            return PushedWeights(folder, label, len(write_adapter(adapter, folder)), self._base)
        except ValueError as error:
            raise WeightsError(str(error)) from error

    def _sweep(self, before: PushedWeights | None) -> None:
        """Remove the weights that no server will ask for again.

        The last adapter stays for one more push: vLLM may still have a request for it that is about to be broken off.
        """
        current = self._supervisor.current
        last = before if before and before.base else None
        kept = {one.folder for one in (current, current and current.base, self._base, last) if one}
        for folder in set(self._root.iterdir()) - kept:
            shutil.rmtree(folder, ignore_errors=True)

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> FinishedGroups:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes.

        A later call ends an earlier one.

        Raises:
            RuntimeError: outside an awake block, or continued after the call was ended.
            Unsendable: a prompt has a video.
            RequestRefused: a prompt that no server can serve, e.g. one that is too long for the model; or there are
                stop strings, and a server without a tokenizer.
            ServersLost: no server was left for longer than `deadlines.recovery`.
            ServerFault: a group failed on `max_attempts` servers.
        """
        version, current = self._version, self._supervisor.current
        if version is None or current is None:
            raise RuntimeError("generate() needs an awake pool: call it inside `with pool.awake(weights, version)`")
        if params.n > self._max_sequences:
            raise ValueError(f"n={params.n} samples a prompt, but max_sequences={self._max_sequences}: raise it")
        if params.stop:
            self._require_tokenizers()

        def ask_group(
            server: PooledServer, prompt: PromptLike, call: Call, arrived: Callable[[int], None]
        ) -> list[Completion]:
            body = generate_body(prompt, params, self._ends) | current.address
            events = stream(server.endpoint, GENERATE, body, timeout=self._supervisor.deadlines.stall, call=call)
            try:
                return read_group(
                    events,
                    prompt,
                    params,
                    end_token_ids=self._ends,
                    banned=self._banned,
                    label=current.label,
                    version=version,
                    arrived=arrived,
                )
            except NotThere as error:  # somebody has started it anew, so it does not know the adapter
                raise ServerFault(f"{server.name}: {error}") from error

        self._end_dispatch()
        self._dispatch = Dispatch(
            self._supervisor,
            prompts,
            params,
            ask_group,
            max_sequences=self._max_sequences,
            max_attempts=self._max_attempts,
        )
        return self._dispatch.groups()

    def _require_tokenizers(self) -> None:
        with self._supervisor.changed:
            ready = self._supervisor.ready()
        for server in ready:
            server.require_tokenizer(self._supervisor.deadlines.stall)

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-probs [response_length] of each response under the current weights.

        Every server computes all of them, so that one with other weights than the rest is found.

        Raises:
            RuntimeError: outside an awake block.
            ServerFault: a server fails, or two servers disagree.
        """
        current = self._supervisor.current
        if self._version is None or current is None:
            raise RuntimeError("logprobs_of() needs an awake pool: call it inside `with pool.awake(weights, version)`")
        with self._supervisor.changed:
            ready = self._supervisor.ready()
        with ThreadPoolExecutor(len(ready)) as threads:
            logprobs = list(
                threads.map(lambda server: self._replay(server, prompts, responses, temperature, current), ready)
            )
        for server, other in zip(ready[1:], logprobs[1:], strict=True):
            pairs = zip(flatten(logprobs[0]), flatten(other), strict=True)
            if (gap := max((abs(a - b) for a, b in pairs), default=0.0)) > _DISAGREEMENT:
                raise ServerFault(f"log-probs of {ready[0].name} and {server.name} differ by {gap:.3g}: one is stale")
        return logprobs[0]

    def _replay(
        self,
        server: PooledServer,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        temperature: float,
        current: PushedWeights,
    ) -> list[list[float]]:
        timeout = self._supervisor.deadlines.stall
        logprobs = []
        for prompt, response in zip(prompts, responses, strict=True):
            body = replay_body(prompt, response, temperature) | current.address
            answer = ask(server.endpoint, "POST", GENERATE, body, timeout=timeout)
            logprobs.append(read_replay(answer, prompt, response, current.label))
        return logprobs

    def _end_dispatch(self) -> None:
        if self._dispatch is not None:
            self._dispatch.close()
            self._dispatch = None


def _known(parts: Iterable[Bucket], first: dict[str, list[int]] | None) -> Iterator[Bucket]:
    """Pass on the buckets, but refuse one with a tensor that was not in the first push, or not of its shape."""
    for bucket in parts:
        shapes = {name: list(tensor.shape) for name, tensor in bucket}
        _compare(shapes if first is None else {name: first[name] for name in shapes if name in first}, shapes)
        yield bucket


def _compare(first: dict[str, list[int]], shapes: dict[str, list[int]]) -> None:
    """Refuse weights that are not named and shaped like the first: vLLM keeps in silence what does not come, and does
    not recover from a shape that is not its own.
    """
    differing = [
        f"{name} is {shapes.get(name, 'missing')}, was {first.get(name, 'unknown')}"
        for name in sorted(first.keys() | shapes.keys())
        if first.get(name) != shapes.get(name)
    ]
    if differing:
        shown = "; ".join(differing[:5]) + ("; …" if len(differing) > 5 else "")
        raise WeightsError(f"{len(differing)} weights differ from those of the first push: {shown}")
