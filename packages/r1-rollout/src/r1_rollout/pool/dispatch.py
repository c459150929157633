"""Load balancing of a `generate` call over the members of a pool."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, Self

from r1_rollout.errors import EngineError
from r1_rollout.types import Comparison, Completion, Expected, PromptLike, SamplingParams

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

FinishedGroup = tuple[int, list[Completion]]  # the index of a prompt, and its completions
Outcome = list[Completion] | BaseException


class MemberLost(EngineError):
    """The process of a member has died."""


@dataclass(slots=True)
class Backlog:
    """The unfinished work of a member, its load measure."""

    tokens: int = 0  # of prompts, and of answers at full length that have not arrived yet
    groups: int = 0


class Session(Protocol):
    """One `generate` call on one member, which reports each group to the `Dispatch` once."""

    def submit(self, groups: Sequence[tuple[int, PromptLike]]) -> None: ...

    def close(self, *, wait: bool) -> Iterable[int]:
        """Abandon unfinished groups; return those that will not be reported any more.

        Args:
            wait: return only when the member is free for the next call.
        """


class Member(Protocol):
    """One engine of a pool: an actor, a subprocess, or an HTTP server."""

    name: str  # for messages
    backlog: Backlog
    reserve: int  # groups that wait at the engine beyond those that fit, so that it never idles

    def open(self, params: SamplingParams, dispatch: "Dispatch") -> Session: ...

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]: ...

    def compare(self, expected: dict[str, Expected]) -> Comparison: ...


class Fleet:
    """The members of a pool. All take requests, and the first failure ends the call."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.changed = threading.Condition()
        self.broken = False  # a member's process has died for good

    def ready(self) -> Sequence[Member]:
        """Return the members that take requests now. The lock `changed` must be held."""
        return self.members

    def usable(self) -> Sequence[Member]:
        return self.members

    def retries(self, member: Member, error: BaseException) -> bool:
        """Return whether a group that failed may go to another member."""
        self.broken |= isinstance(error, MemberLost)
        return False

    def succeeded(self, member: Member) -> None: ...

    def require_hope(self, since: float) -> None:
        """Raise RolloutError if no member has been ready since (`time.monotonic`) and none will be."""


class Dispatch:
    """The groups of one `generate` call: an iterator of (index of the prompt, its completions).

    Each group goes to the ready member with the smallest backlog that has room for it. Partial results of a failed
    member are dropped, so no group is lost or doubled.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        *,
        max_sequences: int,
        max_attempts: int = 1,
    ) -> None:
        """`max_sequences`: samples that a member works on at once; `max_attempts`: members that a group is tried on."""
        self._fleet, self._prompts, self._params = fleet, prompts, params
        self._room, self._max_attempts = max_sequences // params.n, max_attempts
        self._waiting = deque(range(len(prompts)))
        self._failed: dict[int, list[Member]] = {}  # members that each group has failed on
        self._unfinished: dict[int, tuple[Member, int]] = {}  # at which member, and how many tokens are to come
        self._sessions: dict[Member, Session] = {}
        self._done: SimpleQueue[FinishedGroup | BaseException] = SimpleQueue()
        self._left = len(prompts)
        self._over = self._closed = False
        self._error: BaseException | None = None  # what a consumer gets who asks for more

    def start(self, sessions: dict[Member, Session]) -> Self:
        self._sessions = sessions
        threading.Thread(target=self._run, daemon=True, name="r1-dispatch").start()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FinishedGroup:
        if not self._left:
            self.end("it is complete")
            raise StopIteration
        outcome = self._error or self._done.get()
        if isinstance(outcome, BaseException):
            self._error = outcome
            self.end("it failed")
            raise outcome
        self._left -= 1
        return outcome

    def close(self) -> None:
        self._left = 0
        self.end("it was closed")

    def end(self, reason: str) -> None:
        """Abandon unfinished groups; a consumer who asks for more gets RuntimeError."""
        with self._fleet.changed:
            if not self._over:
                self._error = RuntimeError(f"this generate() call is over: {reason}")
                self._done.put(self._error)
            self._over = True
            closing, self._closed = not self._closed, True
            self._fleet.changed.notify_all()
        for session in self._sessions.values() if closing else ():
            for index in session.close(wait=not self._fleet.broken):
                self._release(index)

    # Called by the sessions.

    def arrived(self, index: int, tokens: int) -> None:
        with self._fleet.changed:
            member, owed = self._unfinished[index]
            member.backlog.tokens -= tokens
            self._unfinished[index] = member, owed - tokens

    def finish(self, index: int, outcome: Outcome) -> None:
        """Deliver a group, or retry it on another member."""
        with self._fleet.changed:
            member = self._release(index)
            if self._over:
                return
            if isinstance(outcome, BaseException):
                self._retry(index, member, outcome)
            else:
                self._fleet.succeeded(member)
                self._done.put((index, outcome))

    def fail(self, member: Member, error: BaseException) -> None:
        self._fleet.retries(member, error)
        self._give_up(error)

    def _retry(self, index: int, member: Member, error: BaseException) -> None:
        if not self._fleet.retries(member, error):
            self._give_up(error)
            return
        failed = self._failed.setdefault(index, [])
        failed.append(member)
        if len(failed) < self._max_attempts:
            self._waiting.appendleft(index)
        else:
            prompt = self._prompts[index].id
            self._give_up(type(error)(f"prompt {prompt} failed {self._max_attempts} times, at last: {error}"))

    def _give_up(self, error: BaseException) -> None:
        with self._fleet.changed:
            if not self._over:
                self._over = True
                self._done.put(error)
                self._fleet.changed.notify_all()

    def _release(self, index: int) -> Member:
        with self._fleet.changed:
            member, owed = self._unfinished.pop(index)
            member.backlog.tokens -= owed
            member.backlog.groups -= 1
            self._fleet.changed.notify_all()
            return member

    # The thread.

    def _run(self) -> None:
        since = time.monotonic()
        try:
            with self._fleet.changed:
                while not self._over and (self._waiting or self._unfinished):
                    given = self._assign()
                    for member, groups in given.items():
                        self._sessions[member].submit(groups)
                    if self._unfinished or self._fleet.ready():
                        since = time.monotonic()
                    else:
                        self._fleet.require_hope(since)
                    self._fleet.changed.wait(0.2)
        except BaseException as error:  # a thread's error must reach the consumer
            self._give_up(error)

    def _assign(self) -> dict[Member, list[tuple[int, PromptLike]]]:
        given: dict[Member, list[tuple[int, PromptLike]]] = {}
        while self._waiting and (choice := self._choose()) is not None:
            index, member = choice
            self._waiting.remove(index)
            owed = self._count_tokens(index)
            self._unfinished[index] = member, owed
            member.backlog.tokens += owed
            member.backlog.groups += 1
            given.setdefault(member, []).append((index, self._prompts[index]))
        return given

    def _choose(self) -> tuple[int, Member] | None:
        """Return the next group that a member has room for, and this member.

        A group returns to a member that failed on it only after all others: a server that answers nonsense is always
        idle and would attract every group.
        """
        free = [one for one in self._fleet.ready() if one.backlog.groups < self._room + one.reserve]
        usable = set(self._fleet.usable())
        for index in self._waiting if free else ():
            failed = self._failed.get(index, [])
            fresh = [one for one in free if one not in failed] if usable.difference(failed) else free
            if fresh:
                return index, min(fresh, key=lambda one: one.backlog.tokens)
        return None

    def _count_tokens(self, index: int) -> int:
        return len(self._prompts[index].token_ids) + self._params.n * self._params.max_tokens
