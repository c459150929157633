"""The servers of a pool: what each holds and owes, how it gets the current weights, how it returns after a fault."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from r1_rollout.vllm.broadcast import Broadcast, BrokenOff, Bucket, Follower
from r1_rollout.vllm.client import (
    Endpoint,
    RequestRefused,
    ServerError,
    ServerFault,
    ServerRejected,
    ServerStalled,
    ask,
)
from r1_rollout.vllm.lane import Backend, Lane
from r1_rollout.vllm.server import GUARD, REQUIRED, LocalServer, ServerFailed
from r1_rollout.vllm.shards import read_buckets

log = logging.getLogger("r1")

_CACHES = ("/reset_mm_cache", "/reset_encoder_cache")
_PATIENCE = 3  # faults in a row after which a server that seems alive is started anew


class ServersLost(ServerError, RuntimeError):
    """No server is left to ask; the message says what became of each."""


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
            arguments = {"folder": str(current.folder), "version": current.label}
            self.half_loaded = True
            held = self._post("/collective_rpc", {"method": "r1_load", "kwargs": arguments}, timeout)
            expected = {"version": current.label, "tensors": current.tensors}
            if not _workers(held) or any(one != expected for one in _workers(held)):
                raise ServerFault(f"{self.name} loaded {held}, expected {expected} of each worker")
            self._settle(current.label, timeout)
        except RequestRefused as error:
            raise ServerFault(self._unfit(error)) from error

    def receive(self, parts: Iterable[Bucket], label: str, backend: Backend, timeout: float) -> None:
        """Give the server the weights over a lane of its own, and see that it has them.

        Raises:
            ServerFault: it has not, for whatever reason.
            BrokenOff: `parts` ended early. What the server has then is of no version.
        """
        try:
            self.half_loaded = True
            with Lane(self.name, self.endpoint, backend, timeout) as lane:
                for bucket in parts:
                    lane.send(bucket)
                lane.finish(label)
            self._settle(label, timeout)
        except RequestRefused as error:
            raise ServerFault(self._unfit(error)) from error

    def _settle(self, label: str, timeout: float) -> None:
        """Let the engine know what its workers hold, and forget what older weights have computed."""
        self.half_loaded = False
        self._reset_prefix_cache(timeout)
        for path in _CACHES:
            self._post(path, None, timeout)
        self._post("/update_weight_version", {"new_version": label}, timeout)
        self.check(label, timeout)

    def _unfit(self, error: RequestRefused) -> str:
        return (
            f"{self.name} takes no weights: {error}\nA server must be started with VLLM_SERVER_DEV_MODE=1 and "
            f"{' '.join(REQUIRED)}"
        )

    def renew(self, current: Current, timeout: float) -> None:
        """Load the weights if the server does not hold them already. Raises ServerFault as `load` does."""
        try:
            self.check(current.label, timeout)
        except ServerStalled:
            raise
        except ServerFault:
            self.load(current, timeout)

    def check(self, label: str, timeout: float) -> None:
        """Raise ServerFault unless the engine and each of its workers say that they hold the weights `label`."""
        try:
            engine = ask(self.endpoint, "GET", "/weight_info", timeout=timeout)
            workers = _workers(self._post("/collective_rpc", {"method": "r1_holds"}, timeout))
        except RequestRefused as error:
            raise ServerFault(str(error)) from error
        if engine != {"weight_version": label} or not workers or any(one != {"version": label} for one in workers):
            raise ServerFault(f"{self.name} holds {engine} and {workers}, not {label}")

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


def _workers(answer: Any) -> list[Any]:
    return answer.get("results") or [] if isinstance(answer, dict) else []


class Members:
    """All servers. `changed` is notified when one of them can take requests, or none can any more."""

    def __init__(
        self, members: Sequence[Member], deadlines: Deadlines, max_restarts: int, backend: Backend | None = None
    ) -> None:
        """Take the servers; `backend` is what `broadcast` sends over."""
        self.all = tuple(members)
        self.deadlines = deadlines
        self.changed = threading.Condition()
        self.current: Current | None = None
        self.closed = False
        self._max_restarts = max_restarts
        self._backend = backend
        self._threads: list[threading.Thread] = []

    def ready(self) -> list[Member]:
        """Return those that hold the current weights and take requests. The lock must be held."""
        label = self.current.label if self.current else None
        return [member for member in self.all if member.state == "ready" and member.label == label]

    def push(self, current: Current) -> None:
        """Bring all servers that are not being revived to the new weights, side by side, over the folder.

        Raises:
            ServersLost: none could be brought there within `deadlines.recovery`, or all say that the weights cannot be.
        """
        with self.changed:
            self.current = current
            due = self._due()
        rejected: list[Member] = []

        def load(member: Member) -> None:
            member.load(current, self.deadlines.load)

        self._await_ready([self._run(self._bring_up, member, load, rejected) for member in due], rejected)

    def broadcast(self, label: str, keep: Callable[[Broadcast], Current]) -> None:
        """Bring all servers that are not being revived to the new weights by one pass over them.

        Args:
            label: of the weights.
            keep: makes the pass, with the broadcast between the buckets and the folder for servers that fail meanwhile
                or later; returns where they are when they are there. What it raises is raised here, after each server
                has gone back to the beginning, so that the next push finds none of them half loaded.

        Raises:
            ServersLost: as `push` does.
        """
        with self.changed:
            before, self.current = self.current, None  # who is being revived waits for the folder
            due = self._due()
        broadcast, rejected = Broadcast(), list[Member]()
        threads = [self._run(self._follow, member, broadcast.join(), label, rejected) for member in due]
        try:
            current = keep(broadcast)
        except BaseException:
            broadcast.end(broken=True)
            for thread in threads:
                thread.join()
            self._make_current(before)
            raise
        self._make_current(current)
        broadcast.end()
        self._await_ready(threads, rejected)

    def _due(self) -> list[Member]:
        return [member for member in self.all if member.state in ("new", "ready")]

    def _make_current(self, current: Current | None) -> None:
        with self.changed:
            self.current = current
            self.changed.notify_all()

    def _await_ready(self, threads: list[threading.Thread], rejected: list[Member]) -> None:
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + self.deadlines.recovery
        if len(rejected) == len(self.all):
            deadline = 0.0
        with self.changed:
            while not self.ready():
                self.require_hope(deadline)
                self.changed.wait(0.2)

    def require_hope(self, deadline: float) -> None:
        """Raise ServersLost if every server is lost, or the time is over. The lock must be held."""
        if self.closed or time.monotonic() > deadline or all(member.state == "lost" for member in self.all):
            fates = "\n".join(f"{member.name} is {member.state}: {member.error}" for member in self.all)
            raise ServersLost(f"no vLLM server takes requests:\n{fates}")

    def _follow(self, member: Member, follower: Follower, label: str, rejected: list[Member]) -> None:
        """Bring one server up in a broadcast; whatever becomes of it, the others wait for it no longer."""

        def receive(member: Member) -> None:
            assert self._backend is not None
            member.receive(follower, label, self._backend, self.deadlines.load)

        with follower:
            self._bring_up(member, receive, rejected)

    def _bring_up(self, member: Member, load: Callable[[Member], None], rejected: list[Member]) -> None:
        try:
            if member.state == "new" and member.local:
                member.local.start(lambda: self.closed)
            elif member.state == "new":
                member.warn_of_open_doors(self.deadlines.load, broadcast=self._backend is not None)
            load(member)
        except (ServerFailed, OSError) as error:
            self._lose(member, error)  # it never ran: trying again would change nothing
        except BrokenOff:
            with self.changed:
                member.state, member.label = "new", None
        except ServerFault as error:
            if isinstance(error, ServerRejected):
                rejected.append(member)
            self.fail(member, error)
        else:
            self._set_ready(member, self.current)

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
                if (current := self._await_current()) is None:
                    return
                self._renew(member, current)
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

    def _await_current(self) -> Current | None:
        """Return whatever has been pushed while a server was out; None if the pool is closed first."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.current is not None)
            return self.current

    def _renew(self, member: Member, current: Current) -> None:
        """Give a server the current weights from the folder, or what is in it by a broadcast of its own."""
        try:
            member.renew(current, self.deadlines.load)
        except ServerRejected:
            if self._backend is None:
                raise
            member.receive(read_buckets(current.folder), current.label, self._backend, self.deadlines.load)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.closed and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _set_ready(self, member: Member, current: Current | None) -> bool:
        """Let a server take requests, unless newer weights have come meanwhile; return whether it does."""
        with self.changed:
            if current is None or current is not self.current:
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
