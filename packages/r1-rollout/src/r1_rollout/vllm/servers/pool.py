"""A pool of vLLM servers as one engine: balanced by the tokens they owe, mended when they fail, never out of date."""

import logging
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from r1_rollout.checksums import Comparison, Expected, merged
from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.types import Completion, OldEngineNames, PromptLike, SamplingParams
from r1_rollout.vllm.client import Call, Endpoint, NotThere, ServerFault, ask, stream
from r1_rollout.vllm.limits import require_temperature
from r1_rollout.vllm.private_folder import PrivateFolder
from r1_rollout.vllm.servers.dispatch import Dispatch, FinishedGroups
from r1_rollout.vllm.servers.lanes import Lane, send_all
from r1_rollout.vllm.servers.pooled_server import PooledServer, PushedWeights
from r1_rollout.vllm.servers.protocol import GENERATE, generate_body, read_group, read_replay, replay_body
from r1_rollout.vllm.servers.server import LocalServer
from r1_rollout.vllm.servers.supervisor import Deadlines, Supervisor
from r1_rollout.vllm.servers.transfer import Backend
from r1_rollout.vllm.shapes import require_same
from r1_rollout.vllm.shards import Written, count_tensors, write_source
from r1_rollout.weight_source import Shapes, WeightSource
from r1_rollout.weights import require_newer

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

log = logging.getLogger("r1")

flatten = chain.from_iterable
_DISAGREEMENT = 0.2  # nats; half precision in another batch moves a log-prob by less


class ServerPool(OldEngineNames):
    """A `Generator` over servers that it starts (`LocalServer`) or is given (`Endpoint`).

    Full weights go over a folder of safetensors files, or by broadcast to the servers' workers; the folder then serves
    a server that fails meanwhile or later. Adapters always go over the folder. A server takes requests only after its
    workers have said that they hold the current weights, and every answer must name them.

    Servers do not sleep between two `active` blocks: they are meant to have GPUs of their own, which nobody else waits
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
        base: Path | None = None,
    ) -> None:
        """Take over the servers; they are started, side by side, by the first `active`.

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
            base: a Hugging Face folder with the weights that adapters stand on, which every server reads by itself;
                None: full weights have to be pushed before the first adapter.

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
        self._folder = PrivateFolder("r1-weights-", folder)
        self._root = self._folder.path / "pushes"
        self._root.mkdir()
        self._bucket_bytes, self._dtype, self._broadcast = bucket_bytes, dtype, broadcast
        self._shapes: Shapes = {}  # of the first full weights that were taken
        self._base = None if base is None else PushedWeights(base, f"base-{uuid.uuid4().hex[:12]}", count_tensors(base))
        self._version: int | None = None
        self._latest = -1  # the newest version that servers have held
        self._active = self._stays_ready = False
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
        self._folder.remove()

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        """Sample inside the block, from the weights of `source` or those that the servers have.

        At its end unfinished requests are broken off.

        Raises:
            RuntimeError: the pool is active already.
            WeightsError, ServersLost: as for `load_weights`.
        """
        if self._active:
            raise RuntimeError(f"the pool is active already, with weight version {self._version}")
        if source is not None:
            self._push(source)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._end_dispatch()

    def load_weights(self, source: WeightSource) -> None:
        """Push weights to all servers, to sample from them until others come; unfinished requests are broken off.

        Args:
            source: of all weights, or of an `Adapter` alone, if the servers were started with `enable_lora` and
                `max_lora_rank`: it stands on the full weights that came last. They are written or sent where they
                are, on the ranks of a learner, say, so that this process need not see a tensor.

        Raises:
            WeightsError: these are not the servers' model's weights: names or shapes differ from those of the first
                push, or all servers reject them; their version is older than the last; or an adapter is empty, binds to
                nothing, or came first.
            ServersLost: no server is there to take the weights.
        """
        self._push(source)
        self._stays_ready = True

    def _push(self, source: WeightSource) -> None:
        require_newer(source.version, self._latest)
        self._end_dispatch()
        self._version, label = None, f"{source.version}-{uuid.uuid4().hex[:12]}"
        before, folder = self._supervisor.current, self._root / label
        try:
            if self._broadcast and not isinstance(source.names(), Adapter):
                self._push_lanes(source, folder, label)
            else:
                self._push_folder(source, folder, label)
        finally:
            self._sweep(before)
        self._version = self._latest = source.version

    def _push_folder(self, source: WeightSource, folder: Path, label: str) -> None:
        """Have the weights written where they are, and load them from there."""
        written = write_source(source, folder, self._bucket_bytes, self._dtype)
        current = self._accept(written, folder, label)
        self._supervisor.push(current)
        if current.base is None:
            self._shapes, self._base = written.shapes, current

    def _accept(self, written: Written, folder: Path, label: str) -> PushedWeights:
        """Return what every server is to hold. Raises WeightsError if it is not what the first push brought."""
        if written.adapter and self._base is None:
            raise WeightsError("an adapter came before the full weights that it stands on: push those first")
        if not written.adapter:
            require_same(self._shapes, written.shapes)
        return PushedWeights(folder, label, len(written.shapes), self._base if written.adapter else None)

    def _push_lanes(self, source: WeightSource, folder: Path, label: str) -> None:
        """Have full weights sent to all servers from where they are; who is up, and what follows, is decided here."""

        def send(lanes: Sequence[Lane]) -> tuple[PushedWeights, Sequence[ServerFault | None]]:
            task = partial(
                send_all, lanes=lanes, label=label, folder=folder,
                max_bytes=self._bucket_bytes, dtype=self._dtype, first=self._shapes,
            )  # fmt: skip
            sent = source.run_with_weights(task)
            self._shapes, self._base = sent.shapes, PushedWeights(folder, label, len(sent.shapes))
            return self._base, sent.faults

        known = self._shapes, self._base
        try:
            self._supervisor.broadcast(send)
        except BaseException:
            self._shapes, self._base = known
            raise

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
            RuntimeError: outside an active block, or continued after the call was ended.
            ValueError: n exceeds `max_sequences`, or vLLM cannot sample at this temperature.
            PromptError: a prompt is too long for the servers, or has a token that the model does not know; nothing was
                sent, and the pool is well.
            Unsendable: a prompt has a video.
            RequestRefused: a prompt that no server can serve; or there are stop strings, and a server without a
                tokenizer.
            ServersLost: no server was left for longer than `deadlines.recovery`.
            ServerFault: a group failed on `max_attempts` servers.
        """
        version, current = self._require_ready("generate")
        require_temperature(params.temperature)
        if params.n > self._max_sequences:
            raise ValueError(f"n={params.n} samples a prompt, but max_sequences={self._max_sequences}: raise it")
        self._require_fit(prompts, [()] * len(prompts), params.max_tokens)
        if params.stop:
            self._require_tokenizers()

        self._end_dispatch()
        self._dispatch = Dispatch(
            self._supervisor,
            prompts,
            params,
            partial(self._ask_group, params, version, current),
            max_sequences=self._max_sequences,
            max_attempts=self._max_attempts,
        )
        return self._dispatch.groups()

    def _ask_group(
        self,
        params: SamplingParams,
        version: int,
        current: PushedWeights,
        server: PooledServer,
        prompt: PromptLike,
        call: Call,
        arrived: Callable[[int], None],
    ) -> list[Completion]:
        """Sample one group on one server. Raises ServerFault, too, where the server does not know the weights."""
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

    def _require_ready(self, what: str) -> tuple[int, PushedWeights]:
        """Return the version of the weights and where they are."""
        current = self._supervisor.current
        if self._version is None or current is None or not (self._active or self._stays_ready):
            raise RuntimeError(f"{what}() needs an active pool: call it inside `with pool.active(source)`")
        return self._version, current

    def _require_fit(self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", max_tokens: int) -> None:
        """Raise PromptError on a prompt that would be refused, or that a server would die of."""
        with self._supervisor.changed:
            found = {server.limits for server in self._supervisor.servers if server.limits}
        for prompt, response in zip(prompts, responses, strict=True):
            for limits in found:
                limits.require(prompt, max(len(response), max_tokens), response)

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
            RuntimeError: outside an active block.
            ValueError: vLLM cannot report at this temperature.
            ServerFault: a server fails, or two servers disagree.
        """
        _, current = self._require_ready("logprobs_of")
        require_temperature(temperature)
        self._require_fit(prompts, responses, 0)
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

    @property
    def precisions(self) -> tuple[str, ...]:
        """That in which weights are sent, and float32, which is also what comes of it where none is set."""
        return tuple({str(self._dtype or torch.float32).removeprefix("torch."), "float32"})

    keeps_layout = False  # as for `VllmEngine`

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        """Compare every server's weights with what they are to be; see `r1_rollout.checksums`."""
        self._require_ready("compare")
        with self._supervisor.changed:
            ready = self._supervisor.ready()
        with ThreadPoolExecutor(len(ready)) as threads:
            load = self._supervisor.deadlines.load
            return merged(list(threads.map(lambda server: server.compare(expected, load), ready)))

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
