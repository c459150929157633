"""One vLLM server as a member of a pool: how it samples, loads weights, and shows which ones it has."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from r1_rollout.errors import EngineError
from r1_rollout.pool.dispatch import Dispatch
from r1_rollout.pool.tasks import Backlog, Task
from r1_rollout.transports.direct import Bucket
from r1_rollout.transports.folder import PushedWeights
from r1_rollout.types import Comparison, Completion, Expected, Json, JsonObject, PromptLike, SamplingParams
from r1_rollout.vllm.client import (
    Endpoint,
    HttpCall,
    NotThere,
    RequestRefused,
    ServerFault,
    ServerRejected,
    ServerStalled,
    ask,
    stream,
    tell,
)
from r1_rollout.vllm.limits import Limits
from r1_rollout.vllm.servers.direct import Backend, ServerReceiver
from r1_rollout.vllm.servers.protocol import GENERATE, generate_body, picture_ids, read_group, read_replay, replay_body
from r1_rollout.vllm.servers.server import GUARD, LocalServer, require_settings
from r1_rollout.weight_checks import merged

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

log = logging.getLogger("r1")

CACHE_MISS = "but data is not provided"  # of vLLM's message that it does not have a picture any more
_CACHES = ("/reset_mm_cache", "/reset_encoder_cache")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a pool of servers waits, in seconds."""

    stall: float = 300.0  # a server with requests that sends nothing for so long counts as hung, and is restarted
    load: float = 600.0  # for one server to load new weights
    probe: float = 5.0  # until a failed server is tried again; twice and three times that after further faults
    recovery: float = 900.0  # with no server up, until the call fails


class PooledServer:
    """One server of a pool. Its fields change under the lock of its `Supervisor`."""

    reserve = 0  # vLLM queues by itself what does not fit

    def __init__(
        self,
        name: str,
        endpoint: Endpoint | None,
        local: LocalServer | None,
        deadlines: Deadlines,
        end_token_ids: Collection[int] = (),
        banned_token_ids: Collection[int] = (),
        backend: Backend | None = None,
    ) -> None:
        self.name, self.local, self.deadlines, self.backend = name, local, deadlines, backend
        self._endpoint = endpoint
        self._ends, self._banned = frozenset(end_token_ids), frozenset(banned_token_ids)
        self.backlog = Backlog()
        self.state: Literal["new", "ready", "down", "lost"] = "new"
        self.current: PushedWeights | None = None  # that every server of the pool is to have
        self.label: str | None = None  # of the weights that it was seen to have
        self.faults = 0  # in a row
        self.half_loaded = False  # a load began and did not end well: which weights vLLM has now is unknown
        self.error = ""
        self._has_tokenizer = False  # it has shown so in this call
        self._pictures: set[str] = set()  # that it has processed in this call, see `picture_ids`
        self.limits: Limits | None = None  # of a request; known once the server has been activated

    @property
    def endpoint(self) -> Endpoint:
        if self.local:
            return self.local.endpoint
        assert self._endpoint is not None
        return self._endpoint

    # Sampling.

    def open(self, params: SamplingParams, dispatch: Dispatch) -> "ServerSession":
        self._has_tokenizer = False
        self._pictures.clear()  # a sync has emptied the server's caches
        return ServerSession(self, self._require_current(), dispatch)

    def sample(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        weights: PushedWeights,
        call: HttpCall,
        arrived: Callable[[int], None],
        finished: Callable[[int, Completion], None],
        prefilled: Callable[[int], None],
    ) -> list[Completion]:
        """Sample one group.

        Args:
            call: cancels the request.
            arrived, finished, prefilled: see `read_group`.

        Raises:
            RequestRefused: no server takes the prompt.
            ServerFault: the server failed, or does not know the weights.
        """
        pictures = picture_ids(prompt)
        named = self._pictures.intersection(pictures)

        def noted(tokens: int) -> None:
            self._pictures.update(pictures)
            arrived(tokens)

        body = generate_body(prompt, params, self._ends, named) | weights.address
        events = stream(self.endpoint, GENERATE, body, timeout=self.deadlines.stall, call=call)
        try:
            ends, banned, label, version = self._ends, self._banned, weights.label, weights.version
            options = {"end_token_ids": ends, "banned": banned, "label": label, "version": version}
            called = {"arrived": noted, "finished": finished, "prefilled": prefilled}
            return read_group(events, prompt, params, **options, **called)  # type: ignore[arg-type]
        except NotThere as error:  # somebody has restarted it, so it does not know the adapter
            raise ServerFault(f"{self.name}: {error}") from error
        except RequestRefused as error:
            if named and CACHE_MISS in str(error):  # it was restarted, or has no room
                self._pictures -= named
                return self.sample(prompt, params, weights, call, arrived, finished, prefilled)
            raise RequestRefused(f"prompt {prompt.id} was refused: {error}") from error

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]:
        current, logprobs = self._require_current(), []
        for prompt, response in zip(prompts, responses, strict=True):
            body = replay_body(prompt, response, temperature) | current.address
            answer = ask(self.endpoint, "POST", GENERATE, body, timeout=self.deadlines.stall)
            logprobs.append(read_replay(answer, prompt, response, current.label))
        return logprobs

    def require_tokenizer(self) -> None:
        """Raise RequestRefused if the server has no tokenizer: it would ignore stop strings."""
        if self._has_tokenizer:
            return
        try:
            ask(self.endpoint, "POST", "/detokenize", {"tokens": [0]}, timeout=self.deadlines.stall)
        except (RequestRefused, ServerRejected) as error:
            raise RequestRefused(
                f"{self.name} has no tokenizer, so no stop strings: give it one, or set stop_token_ids: {error}"
            ) from error
        except ServerFault:
            return  # it is gone, which its requests will show
        self._has_tokenizer = True

    # Weights.

    def load(self, weights: PushedWeights) -> None:
        """Load weights from their folder; an adapter's base, too, if it is missing. Raises ServerFault."""
        with require_settings(self.name, adapters=weights.base is not None):
            if weights.base is None:
                self.half_loaded = True
                self._load_folder("r1_load", weights)
                self.half_loaded = False
            else:
                self._load_adapter(weights, weights.base)

    def receiver(self) -> ServerReceiver:
        assert self.backend is not None
        self.half_loaded = True
        return ServerReceiver(self.name, self.endpoint, self.backend, self.deadlines.load)

    def receive(self, parts: Iterable[Bucket], label: str) -> None:
        link = self.receiver().link()
        try:
            link.open()
            for bucket in parts:
                link.send(bucket)
            link.finish(label)
        finally:
            link.close()
        self.half_loaded = False

    def activate(self, weights: PushedWeights) -> None:
        """Set vLLM's label of the loaded weights, empty older caches, and check all workers.

        Raises:
            ServerFault: the server does not have `weights`.
        """
        with require_settings(self.name):
            self._reset_prefix_cache()
            for path in _CACHES:
                self._post(path, None)
            self._post("/update_weight_version", {"new_version": weights.label})
            self.limits = self._read_limits()
        self.check(weights)

    def renew(self, weights: PushedWeights) -> None:
        try:
            self.check(weights)
        except ServerStalled:
            raise
        except ServerFault:
            self.load(weights)
            self.activate(weights)

    def check(self, weights: PushedWeights) -> None:
        """Raise ServerFault unless the engine and each of its workers report the label of `weights`."""
        try:
            engine = ask(self.endpoint, "GET", "/weight_info", timeout=self.deadlines.load)
            workers = self._call_workers("r1_holds")
        except RequestRefused as error:
            raise ServerFault(str(error)) from error
        expected = {"base": (weights.base or weights).label, "version": weights.label}
        if engine != {"weight_version": weights.label} or not workers or any(one != expected for one in workers):
            base = f" on base {weights.base.label}" if weights.base else ""
            raise ServerFault(f"{self.name} holds {engine} and {workers}, not {weights.label}{base}")

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        sums = {name: [one.rows, {k: str(total) for k, total in one.sums.items()}] for name, one in expected.items()}
        workers = self._call_workers("r1_compare", expected=sums)
        try:
            found = [
                Comparison(
                    {name: frozenset((int(a), int(b)) for a, b in pairs) for name, pairs in one["differing"].items()},
                    tuple(one["unread"]),
                )
                for one in workers
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFault(f"{self.name} does not compare its weights, but answers {workers}") from error
        if not found:
            raise ServerFault(f"{self.name} has no worker that compares its weights")
        return merged(found)

    def warn_if_open(self) -> None:
        if self.backend is not None and self.endpoint.remote:
            log.warning("%s: weights are sent over the network in the clear; use a private one or a tunnel", self.name)
        if self.endpoint.exposed:
            log.warning(
                "%s: the token and the prompts are sent over the network in the clear; use https or a tunnel", self.name
            )
        try:
            ask(Endpoint(self.endpoint.url), "GET", "/weight_info", timeout=self.deadlines.load)
        except (ServerFault, RequestRefused):
            return
        log.warning("%s replaces its weights for anybody: start it with --middleware=%s", self.name, GUARD)

    def _require_current(self) -> PushedWeights:
        if self.current is None:
            raise EngineError(f"{self.name} has no weights yet")
        return self.current

    def _load_adapter(self, adapter: PushedWeights, base: PushedWeights) -> None:
        """Replace the adapter; vLLM's own method would read its files at every step."""
        if any(one.get("base") != base.label for one in self._call_workers("r1_holds")):
            self.load(base)
        timeout = self.deadlines.load
        for name in self._list_adapters():
            tell(self.endpoint, "/v1/unload_lora_adapter", {"lora_name": name}, timeout=timeout)
        arguments = {"lora_name": adapter.label, "lora_path": str(adapter.folder)}
        tell(self.endpoint, "/v1/load_lora_adapter", arguments, timeout=timeout)
        self._load_folder("r1_adopt", adapter)

    def _list_adapters(self) -> list[str]:
        models = ask(self.endpoint, "GET", "/v1/models", timeout=self.deadlines.load)
        try:
            return [card["id"] for card in models["data"] if card.get("parent")]
        except (TypeError, KeyError, AttributeError) as error:
            raise ServerFault(f"{self.name}: /v1/models has another form: {models}") from error

    def _load_folder(self, method: str, weights: PushedWeights) -> None:
        workers = self._call_workers(method, folder=str(weights.folder), version=weights.label)
        if errors := [one["error"] for one in workers if "error" in one]:
            raise ServerRejected(f"{self.name}: {errors[0]}")
        expected = {"version": weights.label, "tensors": weights.tensors}
        if not workers or any(one != expected for one in workers):
            raise ServerFault(f"{self.name} loaded {workers}, expected {expected} of each worker")

    def _read_limits(self) -> Limits:
        workers = self._call_workers("r1_limits")
        try:
            sizes = ((one["vocabulary"], one["max_model_len"]) for one in workers)
            return Limits(*(min(column) for column in zip(*sizes, strict=True)))
        except (KeyError, TypeError) as error:
            raise ServerFault(f"{self.name} does not report what a request may hold, but {workers}") from error

    def _reset_prefix_cache(self) -> None:
        deadline = time.monotonic() + self.deadlines.load
        while self._post("/reset_prefix_cache", None) != {"success": True}:
            if time.monotonic() > deadline:
                raise ServerStalled(f"{self.name} could not empty its prefix cache within {self.deadlines.load:g} s")
            time.sleep(0.05)

    def _call_workers(self, method: str, **arguments: Json) -> list[JsonObject]:
        body = {"method": method, "kwargs": arguments} if arguments else {"method": method}
        answer = self._post("/collective_rpc", body)
        results = answer.get("results") or [] if isinstance(answer, dict) else []
        return [one if isinstance(one, dict) else {"answer": one} for one in results]

    def _post(self, path: str, body: JsonObject | None) -> Json:
        return ask(self.endpoint, "POST", path, body, timeout=self.deadlines.load)


class ServerSession:
    """One call on one server: a request and a thread for each group."""

    def __init__(self, server: PooledServer, weights: PushedWeights, dispatch: Dispatch) -> None:
        self._server, self._weights, self._dispatch = server, weights, dispatch
        self._lock = threading.Lock()
        self._calls: dict[int, HttpCall] = {}
        self._prefilled: list[int] = []  # tokens, of the groups of which the server has told
        self._groups = 0  # that it has sampled

    @property
    def prefilled(self) -> int | None:
        with self._lock:
            return sum(self._prefilled) if len(self._prefilled) == self._groups else None

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            with self._lock:
                self._calls[task.index] = call = HttpCall()
            threading.Thread(target=self._sample, args=(task, call), daemon=True, name=f"r1-group-{task.index}").start()

    def cancel(self, index: int) -> None:
        with self._lock:
            call = self._calls.get(index)
        if call is not None:
            call.cancel()

    def close(self, *, wait: bool) -> Iterable[int]:
        with self._lock:
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        return ()  # the threads report their groups

    def _sample(self, task: Task, call: HttpCall) -> None:
        outcome: list[Completion] | BaseException
        try:
            arrived = partial(self._dispatch.arrived, task.index)
            finished = partial(self._dispatch.deliver, task.index) if task.split else lambda number, completion: None
            told: list[int] = []
            sample = self._server.sample
            outcome = sample(task.prompt, task.params, self._weights, call, arrived, finished, told.append)
            with self._lock:
                self._groups += 1
                self._prefilled += told
        except BaseException as error:  # a thread's error must reach the consumer
            outcome = error
        with self._lock:
            del self._calls[task.index]
        self._dispatch.finish(task.index, outcome)
