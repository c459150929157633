"""The servers of a pool together: who brings them to the current weights, and back after a fault."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r1_rollout.errors import ServerError, WeightsError
from r1_rollout.vllm.client import ServerFault, ServerRejected, ServerStalled
from r1_rollout.vllm.servers.lanes import Lane
from r1_rollout.vllm.servers.pooled_server import PooledServer, PushedWeights
from r1_rollout.vllm.servers.server import ServerFailed
from r1_rollout.vllm.servers.transfer import Backend
from r1_rollout.vllm.shards import read_buckets

log = logging.getLogger("r1")

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


class Supervisor:
    """All servers. `changed` is notified when one of them can take requests, or none can any more."""

    def __init__(
        self, servers: Sequence[PooledServer], deadlines: Deadlines, max_restarts: int, backend: Backend | None = None
    ) -> None:
        """Take the servers; `backend` is what `broadcast` sends over."""
        self.servers = tuple(servers)
        self.deadlines = deadlines
        self.changed = threading.Condition()
        self.current: PushedWeights | None = None
        self.closed = False
        self._max_restarts = max_restarts
        self._backend = backend
        self._threads: list[threading.Thread] = []

    def ready(self) -> list[PooledServer]:
        """Return those that hold the current weights and take requests. The lock must be held."""
        if self.current is None:
            return []
        return [server for server in self.servers if server.state == "ready" and server.label == self.current.label]

    def push(self, current: PushedWeights) -> None:
        """Bring all servers that are not being revived to the new weights, side by side, over the folder.

        Raises:
            ServersLost: none could be brought there within `deadlines.recovery`.
            WeightsRefused: all say that they cannot take these weights. The next push may bring better ones.
        """
        with self.changed:
            self.current, before = current, self.current
            due = self._due()
        rejected: dict[PooledServer, ServerFault] = {}

        def load(server: PooledServer) -> None:
            self._begin(server)
            server.load(current, self.deadlines.load)
            self._take_up(server, current)

        self._await_ready([self._run(self._bring_up, server, load, rejected) for server in due], rejected, before)

    def broadcast(self, send: Callable[[Sequence[Lane]], "tuple[PushedWeights, Sequence[ServerFault | None]]"]) -> None:
        """Bring all servers that are not being revived to the new full weights by one pass over them.

        Args:
            send: makes the pass, wherever the weights are, over a lane to each server; returns where they are for
                servers that fail meanwhile or later, and what became of each lane. What it raises is raised here, after
                each server has gone back to the beginning, so that the next push finds none of them half loaded.

        Raises:
            ServersLost, WeightsRefused: as `push` does.
        """
        assert self._backend is not None
        with self.changed:
            before, self.current = self.current, None  # who is being revived waits for the folder
            due = self._due()
        rejected: dict[PooledServer, ServerFault] = {}
        for thread in [self._run(self._bring_up, server, self._begin, rejected) for server in due]:
            thread.join()
        due = [server for server in due if server.state in ("new", "ready")]
        for server in due:
            server.half_loaded = True
        try:
            current, faults = send([server.lane(self._backend, self.deadlines.load) for server in due])
        except BaseException:
            self._renounce(before)
            raise
        with self.changed:
            self.current = current
            self.changed.notify_all()

        def take_up(server: PooledServer) -> None:
            if (fault := found[server]) is not None:
                raise fault
            server.half_loaded = False
            self._take_up(server, current)

        found = dict(zip(due, faults, strict=True))
        self._await_ready([self._run(self._bring_up, server, take_up, rejected) for server in due], rejected, before)

    def _due(self) -> list[PooledServer]:
        return [server for server in self.servers if server.state in ("new", "ready")]

    def _await_ready(
        self, threads: list[threading.Thread], rejected: dict[PooledServer, ServerFault], before: PushedWeights | None
    ) -> None:
        for thread in threads:
            thread.join()
        if len(rejected) == len(self.servers):
            self._renounce(before)
            raise WeightsRefused("no vLLM server takes the weights:\n" + "\n".join(map(str, rejected.values())))
        for server, error in rejected.items():
            self.fail(server, error)
        deadline = time.monotonic() + self.deadlines.recovery
        with self.changed:
            while not self.ready():
                self.require_hope(deadline)
                self.changed.wait(0.2)

    def require_hope(self, deadline: float) -> None:
        """Raise ServersLost if every server is lost, or the time is over. The lock must be held."""
        if self.closed or time.monotonic() > deadline or all(server.state == "lost" for server in self.servers):
            fates = "\n".join(f"{server.name} is {server.state}: {server.error}" for server in self.servers)
            raise ServersLost(f"no vLLM server takes requests:\n{fates}")

    def _renounce(self, before: PushedWeights | None) -> None:
        """Go back behind a push that came to nothing; servers that it left in pieces start anew with the next."""
        with self.changed:
            self.current = before
            for server in self._due():
                server.state, server.label = "new" if server.half_loaded else "ready", None
            self.changed.notify_all()

    def _begin(self, server: PooledServer) -> None:
        """Start a server, or look at one that runs already, before its first weights."""
        if server.state == "new" and server.local:
            server.local.start(lambda: self.closed)
        elif server.state == "new":
            server.warn_of_open_doors(self.deadlines.load, broadcast=self._backend is not None)

    def _take_up(self, server: PooledServer, current: PushedWeights) -> None:
        """Let a server sample from the weights that its workers have."""
        server.activate(current, self.deadlines.load)
        self._set_ready(server, current)

    def _bring_up(
        self, server: PooledServer, stage: Callable[[PooledServer], None], rejected: dict[PooledServer, ServerFault]
    ) -> None:
        """Bring one server a stage further, or take it out."""
        try:
            stage(server)
        except (ServerFailed, OSError) as error:
            self._lose(server, error)  # it never ran: trying again would change nothing
        except ServerRejected as error:
            rejected[server] = error
        except ServerFault as error:
            self.fail(server, error)

    def fail(self, server: PooledServer, error: ServerFault) -> None:
        """Take a server out after a fault, and see in the background that it comes back."""
        with self.changed:
            if self.closed or server.state in ("down", "lost"):
                return
            server.faults += 1
            server.state, server.label, server.error = "down", None, str(error)
            log.warning("%s is taken out: %s", server.name, error)
        self._run(self._revive, server, isinstance(error, ServerStalled))

    def _revive(self, server: PooledServer, stalled: bool) -> None:
        """Probe or restart a server until it holds the current weights, or `max_restarts` restarts were in vain."""
        restarts = 0
        while not self.closed:
            try:
                if server.local and (
                    stalled or server.half_loaded or not server.local.alive or server.faults >= _PATIENCE
                ):
                    restarts += 1
                    stalled = True  # until a restart has succeeded
                    server.local.start(lambda: self.closed)
                    stalled, server.faults = False, 0
                else:
                    self._pause(self.deadlines.probe * min(server.faults, _PATIENCE))
                if (current := self._await_current()) is None:
                    return
                self._renew(server, current)
            except (ServerFault, ServerFailed, OSError) as error:
                server.error = str(error)
                server.faults += 1
                stalled = stalled or isinstance(error, ServerStalled)
                if restarts >= self._max_restarts:
                    self._lose(server, error)
                    return
                continue
            if self._set_ready(server, current):
                log.warning("%s is back", server.name)
                return

    def _await_current(self) -> PushedWeights | None:
        """Return whatever has been pushed while a server was out; None if the pool is closed first."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.current is not None)
            return self.current

    def _renew(self, server: PooledServer, current: PushedWeights) -> None:
        """Give a server the current weights from the folder, or what is in it by a broadcast of its own."""
        try:
            server.renew(current, self.deadlines.load)
        except ServerRejected:
            if self._backend is None or current.base is not None:
                raise
            server.receive(read_buckets(current.folder), current.label, self._backend, self.deadlines.load)
            server.activate(current, self.deadlines.load)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.closed and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _set_ready(self, server: PooledServer, current: PushedWeights) -> bool:
        """Let a server take requests, unless newer weights have come meanwhile; return whether it does."""
        with self.changed:
            if current is not self.current:
                return False
            server.state, server.label, server.error = "ready", current.label, ""
            self.changed.notify_all()
            return True

    def _lose(self, server: PooledServer, error: Exception) -> None:
        with self.changed:
            if not self.closed:
                log.error("%s is given up: %s", server.name, error)
            server.state, server.label, server.error = "lost", None, str(error)
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
        for server in self.servers:
            if server.local:
                server.local.stop()
        for thread in self._threads:
            thread.join(self.deadlines.probe + 60)
        for server in self.servers:  # one may have been starting meanwhile
            if server.local:
                server.local.stop()
