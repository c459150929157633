"""Supervision of a pool's servers: starts them, brings them to the current weights, and revives them after a fault."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from r1_rollout.errors import ServerError, WeightsError
from r1_rollout.pool.dispatch import Fleet, Member
from r1_rollout.transports.folder import PushedWeights, read_buckets
from r1_rollout.vllm.client import ServerFault, ServerRejected, ServerStalled
from r1_rollout.vllm.servers.pooled_server import Deadlines, PooledServer
from r1_rollout.vllm.servers.server import ServerFailed

log = logging.getLogger("r1")

_PATIENCE = 3  # faults in a row after which a server that seems alive is restarted


class ServersLost(ServerError, RuntimeError):
    """No server takes requests."""


class WeightsRefused(ServerError, WeightsError):
    """No server can load the weights."""


class Supervisor(Fleet):
    """The servers of a pool. `changed` is notified when a server becomes ready, and when none can.

    Raises ServersLost if every server is lost, or none was up for `deadlines.recovery` seconds.
    """

    def __init__(self, servers: Sequence[PooledServer], deadlines: Deadlines, max_restarts: int) -> None:
        super().__init__(servers)
        self.servers = tuple(servers)
        self.deadlines = deadlines
        self.current: PushedWeights | None = None  # None during a sync, too: revived servers wait for its end
        self.closed = False
        self._max_restarts = max_restarts
        self._threads: list[threading.Thread] = []

    def ready(self) -> list[PooledServer]:
        if self.current is None:
            return []
        return [server for server in self.servers if server.state == "ready" and server.label == self.current.label]

    def usable(self) -> list[PooledServer]:
        return [server for server in self.servers if server.state != "lost"]

    def retries(self, member: Member, error: BaseException) -> bool:
        if not isinstance(error, ServerFault) or not isinstance(member, PooledServer):
            return False
        self.fail(member, error)
        return True

    def succeeded(self, member: Member) -> None:
        if isinstance(member, PooledServer):
            member.faults = 0

    def require_hope(self, since: float) -> None:
        waited = time.monotonic() - since
        if self.closed or waited > self.deadlines.recovery or all(server.state == "lost" for server in self.servers):
            states = "\n".join(f"{server.name} is {server.state}: {server.error}" for server in self.servers)
            raise ServersLost(f"no vLLM server takes requests:\n{states}")

    # Weight sync.

    def sync(
        self, weights: PushedWeights, send: Callable[[Sequence[PooledServer]], Sequence[Exception | None]]
    ) -> None:
        """Bring all servers that are not being revived to new weights.

        Args:
            weights: in a folder when `send` returns.
            send: sends the weights to servers; returns what each has failed at. If it raises, half-loaded servers are
                started from the beginning by the next sync.

        Raises:
            ServersLost: no server had the weights within `deadlines.recovery`.
            WeightsRefused: all servers report that they cannot load these weights.
        """
        with self.changed:
            before = self.current
            self._set_current(None)
            due = self._due()
        rejected: dict[PooledServer, ServerFault] = {}
        self._stage(due, self._begin, rejected)
        up = [server for server in due if server.state in ("new", "ready")]
        try:
            faults = dict(zip(up, send(up), strict=True))
        except BaseException:
            self._roll_back(before)
            raise
        with self.changed:
            self._set_current(weights)

        def activate(server: PooledServer) -> None:
            if (fault := faults[server]) is not None:
                raise fault
            server.half_loaded = False
            server.activate(weights)
            self._set_ready(server, weights)

        self._stage(up, activate, rejected)
        self._await_ready(rejected, before)

    def _due(self) -> list[PooledServer]:
        return [server for server in self.servers if server.state in ("new", "ready")]

    def _set_current(self, weights: PushedWeights | None) -> None:
        self.current = weights
        for server in self.servers:
            server.current = weights
        self.changed.notify_all()

    def _stage(
        self,
        servers: Sequence[PooledServer],
        stage: Callable[[PooledServer], None],
        rejected: dict[PooledServer, ServerFault],
    ) -> None:
        def run(server: PooledServer) -> None:
            try:
                stage(server)
            except (ServerFailed, OSError) as error:
                self._lose(server, error)  # it never ran: trying again would change nothing
            except ServerRejected as error:
                rejected[server] = error
            except ServerFault as error:
                self.fail(server, error)

        for thread in [self._start(server, lambda server=server: run(server)) for server in servers]:  # type: ignore[misc]
            thread.join()

    def _begin(self, server: PooledServer) -> None:
        if server.state == "new" and server.local:
            server.local.start(lambda: self.closed)
        elif server.state == "new":
            server.warn_if_open()

    def _roll_back(self, before: PushedWeights | None) -> None:
        with self.changed:
            self._set_current(before)
            for server in self._due():
                server.state, server.label = "new" if server.half_loaded else "ready", None

    def _await_ready(self, rejected: dict[PooledServer, ServerFault], before: PushedWeights | None) -> None:
        if len(rejected) == len(self.servers):
            self._roll_back(before)
            raise WeightsRefused("no vLLM server takes the weights:\n" + "\n".join(map(str, rejected.values())))
        for server, error in rejected.items():
            self.fail(server, error)
        since = time.monotonic()
        with self.changed:
            while not self.ready():
                self.require_hope(since)
                self.changed.wait(0.2)

    # Recovery.

    def fail(self, server: PooledServer, error: ServerFault) -> None:
        with self.changed:
            if self.closed or server.state in ("down", "lost"):
                return
            server.faults += 1
            server.state, server.label, server.error = "down", None, str(error)
            log.warning("%s is taken out: %s", server.name, error)
        self._start(server, lambda: self._revive(server, isinstance(error, ServerStalled)))

    def _revive(self, server: PooledServer, stalled: bool) -> None:
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
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.current is not None)
            return self.current

    def _renew(self, server: PooledServer, current: PushedWeights) -> None:
        try:
            server.renew(current)
        except ServerRejected:
            if server.backend is None or current.base is not None:
                raise
            server.receive(read_buckets(current.folder), current.label)
            server.activate(current)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.closed and time.monotonic() < deadline:
            time.sleep(min(0.05, seconds))

    def _set_ready(self, server: PooledServer, current: PushedWeights) -> bool:
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

    def _start(self, server: PooledServer, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True, name=f"r1-{server.name}")
        with self.changed:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
        return thread

    def close(self) -> None:
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
