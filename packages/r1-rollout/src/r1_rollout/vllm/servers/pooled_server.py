"""One server of a pool: how it is given weights, by which way, and what it must say before it takes requests."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r1_rollout.checksums import Comparison, Expected, merged
from r1_rollout.vllm.client import (
    Endpoint,
    RequestRefused,
    ServerFault,
    ServerRejected,
    ServerStalled,
    ask,
    tell,
)
from r1_rollout.vllm.limits import Limits
from r1_rollout.vllm.servers.broadcast import Bucket
from r1_rollout.vllm.servers.lanes import Lane
from r1_rollout.vllm.servers.server import GUARD, LocalServer, must_be_fit
from r1_rollout.vllm.servers.transfer import Backend

log = logging.getLogger("r1")

_CACHES = ("/reset_mm_cache", "/reset_encoder_cache")


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """The weights that every server is to hold."""

    folder: Path
    label: str  # unique for each push, so that a stale server cannot be taken for a fresh one
    tensors: int
    base: "PushedWeights | None" = None  # the full weights that these, an adapter's, stand on

    @property
    def address(self) -> dict[str, str]:
        """What a request must say to be answered by these weights: vLLM calls an adapter by its name."""
        return {"model": self.label} if self.base else {}


class PooledServer:
    """One server of the pool. Its fields change under the lock of `Supervisor`."""

    def __init__(self, name: str, endpoint: Endpoint | None, local: LocalServer | None) -> None:
        self.name = name
        self.local = local
        self._endpoint = endpoint
        self.state: Literal["new", "ready", "down", "lost"] = "new"
        self.label: str | None = None  # of the weights that it was seen to hold
        self.owed = 0  # tokens of the requests under way, prompts and answers, that have not come yet
        self.sequences = 0
        self.faults = 0  # in a row
        self.half_loaded = False  # a load began and did not end well: what vLLM has now is anybody's guess
        self.error = ""
        self.limits: Limits | None = None  # of a request; known when it has been activated

    @property
    def endpoint(self) -> Endpoint:
        return self.local.endpoint if self.local else self._endpoint  # type: ignore[return-value]

    def load(self, current: PushedWeights, timeout: float) -> None:
        """Give the server the weights from their folder; an adapter's base, too, if it is not there.

        Raises:
            ServerFault: it has not taken them, for whatever reason.
        """
        with must_be_fit(self.name, adapters=current.base is not None):
            if current.base is None:
                self.half_loaded = True
                self._take("r1_load", current, timeout)
                self.half_loaded = False
            else:
                self._load_adapter(current, current.base, timeout)

    def lane(self, backend: Backend, timeout: float) -> Lane:
        """Return the server as whoever sends it weights sees it."""
        return Lane(self.name, self.endpoint, backend, timeout)

    def receive(self, parts: Iterable[Bucket], label: str, backend: Backend, timeout: float) -> None:
        """Give the server full weights, called `label`, over a transfer of its own from this process.

        Raises:
            ServerFault: it has not taken them, for whatever reason.
        """
        self.half_loaded = True
        self.lane(backend, timeout).send(parts, label)
        self.half_loaded = False

    def activate(self, current: PushedWeights, timeout: float) -> None:
        """Let the engine know what its workers were given, forget what older weights have computed, and see that all
        hold `current`.

        Raises:
            ServerFault: they do not.
        """
        with must_be_fit(self.name):
            self._reset_prefix_cache(timeout)
            for path in _CACHES:
                self._post(path, None, timeout)
            self._post("/update_weight_version", {"new_version": current.label}, timeout)
            self.limits = self._read_limits(timeout)
        self.check(current, timeout)

    def _load_adapter(self, adapter: PushedWeights, base: PushedWeights, timeout: float) -> None:
        """Let vLLM take up an adapter under its label, in the place of the one before, upon its base.

        Its own loading in place is not used: vLLM would then read the files again at every step.
        """
        if any(one.get("base") != base.label for one in self._held(timeout)):
            self.load(base, timeout)
        for name in self._adapters(timeout):
            tell(self.endpoint, "/v1/unload_lora_adapter", {"lora_name": name}, timeout=timeout)
        arguments = {"lora_name": adapter.label, "lora_path": str(adapter.folder)}
        tell(self.endpoint, "/v1/load_lora_adapter", arguments, timeout=timeout)
        self._take("r1_adopt", adapter, timeout)

    def _adapters(self, timeout: float) -> list[str]:
        """Return the names of the adapters that the server knows."""
        models = ask(self.endpoint, "GET", "/v1/models", timeout=timeout)
        try:
            return [card["id"] for card in models["data"] if card.get("parent")]
        except (TypeError, KeyError, AttributeError) as error:
            raise ServerFault(f"{self.name}: /v1/models has another form: {models}") from error

    def _take(self, method: str, current: PushedWeights, timeout: float) -> None:
        """Call a method of `WeightReceiver` in every worker, and see that each took all tensors."""
        arguments = {"folder": str(current.folder), "version": current.label}
        workers = _workers(self._post("/collective_rpc", {"method": method, "kwargs": arguments}, timeout))
        if errors := [one["error"] for one in workers if "error" in one]:
            raise ServerRejected(f"{self.name}: {errors[0]}")
        expected = {"version": current.label, "tensors": current.tensors}
        if not workers or any(one != expected for one in workers):
            raise ServerFault(f"{self.name} loaded {workers}, expected {expected} of each worker")

    def _read_limits(self, timeout: float) -> Limits:
        """Return the narrowest bounds of the workers, which are all alike."""
        workers = _workers(self._post("/collective_rpc", {"method": "r1_limits"}, timeout))
        try:
            sizes = ((one["vocabulary"], one["max_model_len"]) for one in workers)
            return Limits(*(min(column) for column in zip(*sizes, strict=True)))
        except (KeyError, TypeError) as error:
            raise ServerFault(f"{self.name} does not say what a request may hold, but {workers}") from error

    def compare(self, expected: Mapping[str, Expected], timeout: float) -> Comparison:
        """Compare every worker's weights with what they are to be."""
        sums = {name: [one.rows, {k: str(total) for k, total in one.sums.items()}] for name, one in expected.items()}
        workers = _workers(
            self._post("/collective_rpc", {"method": "r1_compare", "kwargs": {"expected": sums}}, timeout)
        )
        try:
            found = [
                Comparison(
                    {name: frozenset((int(a), int(b)) for a, b in pairs) for name, pairs in one["differing"].items()},
                    tuple(one["unread"]),
                )
                for one in workers
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerFault(f"{self.name} does not compare its weights, but says {workers}") from error
        if not found:
            raise ServerFault(f"{self.name} has no worker that compares its weights")
        return merged(found)

    def _held(self, timeout: float) -> list[dict[str, Any]]:
        """Return what each worker says of its weights."""
        return _workers(self._post("/collective_rpc", {"method": "r1_holds"}, timeout))

    def renew(self, current: PushedWeights, timeout: float) -> None:
        """Load the weights if the server does not hold them already. Raises ServerFault as `load` does."""
        try:
            self.check(current, timeout)
        except ServerStalled:
            raise
        except ServerFault:
            self.load(current, timeout)
            self.activate(current, timeout)

    def check(self, current: PushedWeights, timeout: float) -> None:
        """Raise ServerFault unless the engine and each of its workers say that they hold the weights `current`."""
        try:
            engine = ask(self.endpoint, "GET", "/weight_info", timeout=timeout)
            workers = self._held(timeout)
        except RequestRefused as error:
            raise ServerFault(str(error)) from error
        expected = {"base": (current.base or current).label, "version": current.label}
        if engine != {"weight_version": current.label} or not workers or any(one != expected for one in workers):
            upon = f" upon {current.base.label}" if current.base else ""
            raise ServerFault(f"{self.name} holds {engine} and {workers}, not {current.label}{upon}")

    def require_tokenizer(self, timeout: float) -> None:
        """Raise RequestRefused if the server has no tokenizer: it would pass over stop strings in silence."""
        try:
            ask(self.endpoint, "POST", "/detokenize", {"tokens": [0]}, timeout=timeout)
        except (RequestRefused, ServerRejected) as error:
            raise RequestRefused(
                f"{self.name} has no tokenizer, so no stop strings: give it one, or set stop_token_ids: {error}"
            ) from error
        except ServerFault:
            return  # it is gone, which its requests will show

    def warn_of_open_doors(self, timeout: float, *, broadcast: bool) -> None:
        """Say so if whoever can reach the server can replace its weights, or can listen."""
        if broadcast and self.endpoint.remote:
            log.warning("%s: the weights cross the network in the clear; use a private one or a tunnel", self.name)
        if self.endpoint.exposed:
            log.warning(
                "%s: the token and the prompts cross the network in the clear; use https or a tunnel", self.name
            )
        try:
            ask(Endpoint(self.endpoint.url), "GET", "/weight_info", timeout=timeout)
        except (ServerFault, RequestRefused):
            return
        log.warning("%s replaces its weights for anybody: start it with --middleware=%s", self.name, GUARD)

    def _reset_prefix_cache(self, timeout: float) -> None:
        """Forget keys and values of older weights; retried while requests that were broken off are still leaving."""
        deadline = time.monotonic() + timeout
        while self._post("/reset_prefix_cache", None, timeout) != {"success": True}:
            if time.monotonic() > deadline:
                raise ServerStalled(f"{self.name} could not empty its prefix cache within {timeout:g} s")
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        return ask(self.endpoint, "POST", path, body, timeout=timeout)


def _workers(answer: Any) -> list[dict[str, Any]]:
    results = answer.get("results") or [] if isinstance(answer, dict) else []
    return [one if isinstance(one, dict) else {"answer": one} for one in results]
