"""The servers of a pool: what each holds and owes, how it gets the current weights, how it returns after a fault."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r1_rollout.vllm.client import (
    Endpoint,
    RequestRefused,
    ServerError,
    ServerFault,
    ServerRejected,
    ServerStalled,
    ask,
    tell,
)
from r1_rollout.vllm.server import GUARD, REQUIRED, REQUIRED_ENVIRONMENT, LocalServer, ServerFailed
from r1_rollout.weights import WeightsError

log = logging.getLogger("r1")

_CACHES = ("/reset_mm_cache", "/reset_encoder_cache")
_PATIENCE = 3  # faults in a row after which a server that seems alive is started anew


class ServersLost(ServerError, RuntimeError):
    """No server is left to ask; the message says what became of each."""


class WeightsRefused(ServerError, WeightsError):
    """Every server says that it cannot take the weights; the message says what each finds wrong with them."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the pool waits, in seconds. Together they bound a recovery: a fault is noticed after at most `stall`
    and mended, or the work moved elsewhere, without further waiting; with no server left a call ends after `recovery`.
    """

    stall: float = 300.0  # a server with requests that says nothing for so long is taken for hung, and started anew
    load: float = 600.0  # for one server to load new weights
    probe: float = 5.0  # before a look at a server that is out; twice and three times that after further faults
    recovery: float = 900.0  # with no server up, until the call gives up


@dataclass(frozen=True, slots=True)
class Current:
    """The weights that every server is to hold."""

    folder: Path
    label: str  # unique for each push, so that a stale server cannot be taken for a fresh one
    tensors: int
    base: "Current | None" = None  # the full weights that these, an adapter's, stand on

    @property
    def address(self) -> dict[str, str]:
        """What a request must say to be answered by these weights: vLLM calls an adapter by its name."""
        return {"model": self.label} if self.base else {}


class Member:
    """One server of the pool. Its fields change under the lock of `Members`."""

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

    @property
    def endpoint(self) -> Endpoint:
        return self.local.endpoint if self.local else self._endpoint  # type: ignore[return-value]

    def load(self, current: Current, timeout: float) -> None:
        """Give the server the weights and see that it has them.

        Raises:
            ServerFault: it has not, for whatever reason.
        """
        try:
            if current.base is None:
                self.half_loaded = True
                self._take("r1_load", current, timeout)
                self.half_loaded = False
            else:
                self._load_adapter(current, current.base, timeout)
            self._reset_prefix_cache(timeout)
            for path in _CACHES:
                self._post(path, None, timeout)
            self._post("/update_weight_version", {"new_version": current.label}, timeout)
            self.check(current, timeout)
        except RequestRefused as error:
            settings = " ".join(f"{name}={value}" for name, value in REQUIRED_ENVIRONMENT.items())
            lora = " --enable-lora and --max-lora-rank" if current.base else ""
            raise ServerRejected(
                f"{self.name} takes no weights: {error}\nA server must be started with {settings} and "
                f"{' '.join(REQUIRED)}{lora}"
            ) from error

    def _load_adapter(self, adapter: Current, base: Current, timeout: float) -> None:
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

    def _take(self, method: str, current: Current, timeout: float) -> None:
        """Call a method of `WeightReceiver` in every worker, and see that each took all tensors."""
        arguments = {"folder": str(current.folder), "version": current.label}
        workers = _workers(self._post("/collective_rpc", {"method": method, "kwargs": arguments}, timeout))
        if errors := [one["error"] for one in workers if "error" in one]:
            raise ServerRejected(f"{self.name}: {errors[0]}")
        expected = {"version": current.label, "tensors": current.tensors}
        if not workers or any(one != expected for one in workers):
            raise ServerFault(f"{self.name} loaded {workers}, expected {expected} of each worker")

    def _held(self, timeout: float) -> list[dict[str, Any]]:
        """Return what each worker says of its weights."""
        return _workers(self._post("/collective_rpc", {"method": "r1_holds"}, timeout))

    def renew(self, current: Current, timeout: float) -> None:
        """Load the weights if the server does not hold them already. Raises ServerFault as `load` does."""
        try:
            self.check(current, timeout)
        except ServerStalled:
            raise
        except ServerFault:
            self.load(current, timeout)

    def check(self, current: Current, timeout: float) -> None:
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

    def warn_of_open_doors(self, timeout: float) -> None:
        """Say so if whoever can reach the server can replace its weights, or can listen."""
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


class Members:
    """All servers. `changed` is notified when one of them can take requests, or none can any more."""

    def __init__(self, members: Sequence[Member], deadlines: Deadlines, max_restarts: int) -> None:
        self.all = tuple(members)
        self.deadlines = deadlines
        self.changed = threading.Condition()
        self.current: Current | None = None
        self.closed = False
        self._max_restarts = max_restarts
        self._threads: list[threading.Thread] = []

    def ready(self) -> list[Member]:
        """Return those that hold the current weights and take requests. The lock must be held."""
        if self.current is None:
            return []
        return [member for member in self.all if member.state == "ready" and member.label == self.current.label]

    def push(self, current: Current) -> None:
        """Bring all servers that are not being revived to the new weights, side by side.

        Raises:
            ServersLost: none could be brought there within `deadlines.recovery`.
            WeightsRefused: all say that they cannot take these weights. The next push may bring better ones.
        """
        with self.changed:
            self.current, before = current, self.current
            due = [member for member in self.all if member.state in ("new", "ready")]
        rejected: dict[Member, ServerFault] = {}
        threads = [self._run(self._bring_up, member, current, rejected) for member in due]
        for thread in threads:
            thread.join()
        if len(rejected) == len(self.all):
            self._renounce(before)
            raise WeightsRefused("no vLLM server takes the weights:\n" + "\n".join(map(str, rejected.values())))
        for member, error in rejected.items():
            self.fail(member, error)
        deadline = time.monotonic() + self.deadlines.recovery
        with self.changed:
            while not self.ready():
                self.require_hope(deadline)
                self.changed.wait(0.2)

    def require_hope(self, deadline: float) -> None:
        """Raise ServersLost if every server is lost, or the time is over. The lock must be held."""
        if self.closed or time.monotonic() > deadline or all(member.state == "lost" for member in self.all):
            fates = "\n".join(f"{member.name} is {member.state}: {member.error}" for member in self.all)
            raise ServersLost(f"no vLLM server takes requests:\n{fates}")

    def _renounce(self, before: Current | None) -> None:
        """Go back behind a push that every server rejected; those that it left in pieces start anew with the next."""
        with self.changed:
            self.current = before
            for member in self.all:
                member.state, member.label = "new" if member.half_loaded else "ready", None

    def _bring_up(self, member: Member, current: Current, rejected: dict[Member, ServerFault]) -> None:
        try:
            if member.state == "new" and member.local:
                member.local.start(lambda: self.closed)
            elif member.state == "new":
                member.warn_of_open_doors(self.deadlines.load)
            member.load(current, self.deadlines.load)
        except (ServerFailed, OSError) as error:
            self._lose(member, error)  # it never ran: trying again would change nothing
        except ServerRejected as error:
            rejected[member] = error
        except ServerFault as error:
            self.fail(member, error)
        else:
            self._set_ready(member, current)

    def fail(self, member: Member, error: ServerFault) -> None:
        """Take a server out after a fault, and see in the background that it comes back."""
        with self.changed:
            if self.closed or member.state in ("down", "lost"):
                return
            member.faults += 1
            member.state, member.label, member.error = "down", None, str(error)
            log.warning("%s is taken out: %s", member.name, error)
        self._run(self._revive, member, isinstance(error, ServerStalled))

    def _revive(self, member: Member, stalled: bool) -> None:
        """Probe or restart a server until it holds the current weights, or `max_restarts` restarts were in vain."""
        restarts = 0
        while not self.closed:
            try:
                if member.local and (
                    stalled or member.half_loaded or not member.local.alive or member.faults >= _PATIENCE
                ):
                    restarts += 1
                    stalled = True  # until a restart has succeeded
                    member.local.start(lambda: self.closed)
                    stalled, member.faults = False, 0
                else:
                    self._pause(self.deadlines.probe * min(member.faults, _PATIENCE))
                current = self.current  # whatever has been pushed while the server started
                assert current is not None
                member.renew(current, self.deadlines.load)
            except (ServerFault, ServerFailed, OSError) as error:
                member.error = str(error)
                member.faults += 1
                stalled = stalled or isinstance(error, ServerStalled)
                if restarts >= self._max_restarts:
                    self._lose(member, error)
                    return
                continue
            if self._set_ready(member, current):
                log.warning("%s is back", member.name)
                return

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.closed and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _set_ready(self, member: Member, current: Current) -> bool:
        """Let a server take requests, unless newer weights have come meanwhile; return whether it does."""
        with self.changed:
            if current is not self.current:
                return False
            member.state, member.label, member.error = "ready", current.label, ""
            self.changed.notify_all()
            return True

    def _lose(self, member: Member, error: Exception) -> None:
        with self.changed:
            if not self.closed:
                log.error("%s is given up: %s", member.name, error)
            member.state, member.label, member.error = "lost", None, str(error)
            self.changed.notify_all()

    def _run(self, what: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=what, args=arguments, daemon=True, name=f"r1-{arguments[0].name}")
        with self.changed:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
        return thread

    def close(self) -> None:
        """Stop the servers that were started here."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for member in self.all:
            if member.local:
                member.local.stop()
        for thread in self._threads:
            thread.join(self.deadlines.probe + 60)
        for member in self.all:  # one may have been starting meanwhile
            if member.local:
                member.local.stop()
