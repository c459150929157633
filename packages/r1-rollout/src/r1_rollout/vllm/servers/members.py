"""The servers of a pool together: who brings them to the current weights, and back after a fault."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from r1_rollout.vllm.client import ServerError, ServerFault, ServerRejected, ServerStalled
from r1_rollout.vllm.servers.broadcast import Broadcast, BrokenOff, Follower
from r1_rollout.vllm.servers.lane import Backend
from r1_rollout.vllm.servers.member import Current, Member
from r1_rollout.vllm.servers.server import ServerFailed
from r1_rollout.vllm.shards import read_buckets
from r1_rollout.weights import WeightsError

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
        if self.current is None:
            return []
        return [member for member in self.all if member.state == "ready" and member.label == self.current.label]

    def push(self, current: Current) -> None:
        """Bring all servers that are not being revived to the new weights, side by side, over the folder.

        Raises:
            ServersLost: none could be brought there within `deadlines.recovery`.
            WeightsRefused: all say that they cannot take these weights. The next push may bring better ones.
        """
        with self.changed:
            self.current, before = current, self.current
            due = self._due()
        rejected: dict[Member, ServerFault] = {}

        def load(member: Member) -> None:
            member.load(current, self.deadlines.load)

        self._await_ready([self._run(self._bring_up, member, load, rejected) for member in due], rejected, before)

    def broadcast(self, label: str, keep: Callable[[Broadcast], Current]) -> Current:
        """Bring all servers that are not being revived to the new full weights by one pass over them.

        Args:
            label: of the weights.
            keep: makes the pass, with the broadcast between the buckets and the folder for servers that fail meanwhile
                or later; returns where they are when they are there. What it raises is raised here, after each server
                has gone back to the beginning, so that the next push finds none of them half loaded.

        Returns:
            What `keep` returned.

        Raises:
            ServersLost, WeightsRefused: as `push` does.
        """
        with self.changed:
            before, self.current = self.current, None  # who is being revived waits for the folder
            due = self._due()
        broadcast, rejected = Broadcast(), dict[Member, ServerFault]()
        threads = [self._run(self._follow, member, broadcast.join(), label, rejected) for member in due]
        try:
            current = keep(broadcast)
        except BaseException:
            broadcast.end(broken=True)
            for thread in threads:
                thread.join()
            self._renounce(before)
            raise
        with self.changed:
            self.current = current
            self.changed.notify_all()
        broadcast.end()
        self._await_ready(threads, rejected, before)
        return current

    def _due(self) -> list[Member]:
        return [member for member in self.all if member.state in ("new", "ready")]

    def _await_ready(
        self, threads: list[threading.Thread], rejected: dict[Member, ServerFault], before: Current | None
    ) -> None:
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
        """Go back behind a push that came to nothing; servers that it left in pieces start anew with the next."""
        with self.changed:
            self.current = before
            for member in self._due():
                member.state, member.label = "new" if member.half_loaded else "ready", None
            self.changed.notify_all()

    def _follow(self, member: Member, follower: Follower, label: str, rejected: dict[Member, ServerFault]) -> None:
        """Bring one server up in a broadcast; whatever becomes of it, the others wait for it no longer."""

        def receive(member: Member) -> None:
            assert self._backend is not None
            member.receive(follower, label, self._backend, self.deadlines.load)

        with follower:
            self._bring_up(member, receive, rejected)

    def _bring_up(self, member: Member, load: Callable[[Member], None], rejected: dict[Member, ServerFault]) -> None:
        try:
            if member.state == "new" and member.local:
                member.local.start(lambda: self.closed)
            elif member.state == "new":
                member.warn_of_open_doors(self.deadlines.load, broadcast=self._backend is not None)
            load(member)
            current = self.current
            assert current is not None  # a broadcast ends, unless broken off, when its folder is current
            member.settle(current, self.deadlines.load)
            self._set_ready(member, current)
        except (ServerFailed, OSError) as error:
            self._lose(member, error)  # it never ran: trying again would change nothing
        except BrokenOff:
            pass  # `broadcast` sees to all that followed
        except ServerRejected as error:
            rejected[member] = error
        except ServerFault as error:
            self.fail(member, error)

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
            if self._backend is None or current.base is not None:
                raise
            member.receive(read_buckets(current.folder), current.label, self._backend, self.deadlines.load)
            member.settle(current, self.deadlines.load)

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
