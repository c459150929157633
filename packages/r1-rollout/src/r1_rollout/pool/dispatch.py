"""Load balancing of a call, `generate` or a session, over the members of a pool."""

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, Self

from r1_rollout.pool.prefixes import PrefixIndex
from r1_rollout.pool.tasks import Backlog, FinishedPart, MemberLost, Outcome, Task
from r1_rollout.types import Comparison, Completion, Expected, PromptLike, SamplingParams

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

FinishedGroup = tuple[int, list[Completion]]  # the index of a prompt, and its completions


class MemberCall(Protocol):
    """One call on one member, which reports each group to the `Dispatch` once, and before it samples of split ones."""

    @property
    def prefilled(self) -> int | None:
        """See `GenerationSession.prefilled`."""

    def submit(self, tasks: Sequence[Task]) -> None: ...

    def cancel(self, index: int) -> None:
        """Abandon an unfinished group, which is reported nevertheless, with any outcome."""

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

    def open(self, params: SamplingParams, dispatch: "Dispatch") -> MemberCall:
        """Begin a call; in a session, each request's parameters differ from `params` in `n`, length and stops."""

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]: ...

    def compare(self, expected: dict[str, Expected]) -> Comparison: ...


@dataclass(slots=True)
class Assigned:
    """What is to come of a group that a member works on."""

    member: Member
    tokens: int
    samples: int


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
    """The groups of one call. For `generate` it is an iterator of (index of the prompt, its completions).

    Each group goes to the ready member with the smallest backlog that has room for it, or to the one that has computed
    the beginning of its prompt. Partial results of a failed member are dropped, so no group is lost or doubled.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        *,
        max_sequences: int,
        max_attempts: int = 1,
        session: bool = False,
    ) -> None:
        """Take the call.

        Args:
            max_sequences: samples that a member works on at once.
            max_attempts: members that a group is tried on.
            session: more groups may come, by `add`, until the call is closed.
        """
        self._fleet, self._max_sequences, self._max_attempts = fleet, max_sequences, max_attempts
        self.session = session
        self._tasks = {index: Task(index, prompt, params) for index, prompt in enumerate(prompts)}  # not yet delivered
        self._waiting = deque(self._tasks)
        self._sizes = Counter([params.n] * len(prompts))  # waiting groups by their samples
        self._added = len(prompts)
        self._prefixes: PrefixIndex[Member] = PrefixIndex()
        self._holders: dict[int, Member] = {}  # of the beginning of a waiting group's prompt
        self._cancelled: set[int] = set()
        self._untaken: dict[int, int] = {}  # results that `take` has not returned, of groups of a session
        self._delivered: dict[int, set[int]] = {}  # samples of split groups
        self._failed: dict[int, list[Member]] = {}  # members that each group has failed on
        self._unfinished: dict[int, Assigned] = {}
        self._sessions: dict[Member, MemberCall] = {}
        self._done: SimpleQueue[FinishedPart | BaseException] = SimpleQueue()
        self._left = len(prompts)
        self._over = self._closed = False
        self._error: BaseException | None = None  # what a consumer gets who asks for more

    def start(self, sessions: dict[Member, MemberCall]) -> Self:
        self._sessions = sessions
        threading.Thread(target=self._run, daemon=True, name="r1-dispatch").start()
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FinishedGroup:
        if not self._left:
            self.end("it is complete")
            raise StopIteration
        index, _, completions = self._require_part(self._error or self._done.get())
        self._left -= 1
        return index, completions

    def _require_part(self, outcome: FinishedPart | BaseException) -> FinishedPart:
        if isinstance(outcome, BaseException):
            self._error = outcome
            self.end("it failed")
            raise outcome
        return outcome

    # Of a session.

    @property
    def pending(self) -> bool:
        return self._left > 0

    @property
    def prefilled(self) -> int | None:
        """See `GenerationSession.prefilled`."""
        counts = [session.prefilled for session in self._sessions.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def is_open(self, index: int) -> bool:
        """Whether `take` has something of a group to return."""
        return index in self._untaken

    def add(self, prompt: PromptLike, params: SamplingParams, *, split: bool = False) -> int:
        """Add a group; return its index. If it is split, `take` returns its samples one by one."""
        with self._fleet.changed:
            index, self._added = self._added, self._added + 1
            self._tasks[index] = Task(index, prompt, params, split)
            self._untaken[index] = results = params.n if split else 1
            if (holder := self._prefixes.find(prompt.token_ids)) is not None:
                self._holders[index] = holder
            self._waiting.append(index)
            self._sizes[params.n] += 1
            self._left += results
            self._fleet.changed.notify_all()
        return index

    def take(self, timeout: float | None) -> list[FinishedPart]:
        """Return what has finished; wait up to `timeout` seconds for the first, or as long as it takes."""
        if self._error is not None:
            raise self._error
        if not self._left:
            return []
        until = None if timeout is None else time.monotonic() + timeout
        taken: list[FinishedPart] = []
        with suppress(Empty):
            while self._left > len(taken):
                wait = None if until is None else until - time.monotonic()
                block = not taken and (wait is None or wait > 0)
                part = self._require_part(self._done.get(block, wait if block else None))
                if part[0] not in self._cancelled:  # when it had finished already
                    taken.append(part)
        self._left -= len(taken)
        for index, _, _ in taken:
            self._untaken[index] -= 1
            if not self._untaken[index]:
                del self._untaken[index]
        return taken

    def cancel(self, index: int) -> None:
        """Abandon a group that `take` has not returned whole."""
        with self._fleet.changed:
            self._left -= self._untaken.pop(index)
            self._cancelled.add(index)
            if index in self._waiting:
                self._take_out(index)
                del self._tasks[index]
                return
            member = self._unfinished[index].member if index in self._unfinished else None
        if member is not None:
            self._sessions[member].cancel(index)

    def close(self) -> None:
        self._left = 0
        self.end("it was closed")

    def end(self, reason: str) -> None:
        """Abandon unfinished groups; a consumer who asks for more gets RuntimeError."""
        with self._fleet.changed:
            if not self._over:
                self._error = RuntimeError(f"this {'session' if self.session else 'generate() call'} is over: {reason}")
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
            assigned = self._unfinished[index]
            assigned.member.backlog.tokens -= tokens
            assigned.tokens -= tokens

    def deliver(self, index: int, number: int, completion: Completion) -> None:
        """Deliver a sample of a split group, unless a member that failed later has delivered it before."""
        with self._fleet.changed:
            if (assigned := self._unfinished.get(index)) is not None and not self._over:
                assigned.member.backlog.samples -= 1
                assigned.samples -= 1
                self._put(index, number, completion)
                self._fleet.changed.notify_all()

    def _put(self, index: int, number: int, completion: Completion) -> None:
        delivered = self._delivered.setdefault(index, set())
        if number not in delivered and index not in self._cancelled:
            delivered.add(number)
            self._done.put((index, number, [completion]))

    def finish(self, index: int, outcome: Outcome) -> None:
        """Deliver a group, or retry it on another member. Samples that were delivered may be left out at its end."""
        with self._fleet.changed:
            member = self._release(index)
            if self._over:
                return
            if index in self._cancelled:
                del self._tasks[index]
            elif isinstance(outcome, BaseException):
                self._retry(index, member, outcome)
            else:
                self._fleet.succeeded(member)
                if self._tasks.pop(index).split:
                    for number, completion in enumerate(outcome):
                        self._put(index, number, completion)
                    self._delivered.pop(index, None)
                else:
                    self._done.put((index, None, outcome))

    def fail(self, member: Member, error: BaseException) -> None:
        """Note that a member failed that has no unfinished groups."""
        if not self._fleet.retries(member, error):
            self._give_up(error)

    def _retry(self, index: int, member: Member, error: BaseException) -> None:
        if not self._fleet.retries(member, error):
            self._give_up(error)
            return
        failed = self._failed.setdefault(index, [])
        failed.append(member)
        if len(failed) < self._max_attempts:
            self._waiting.appendleft(index)
            self._sizes[self._tasks[index].params.n] += 1
        else:
            prompt = self._tasks[index].prompt.id
            self._give_up(type(error)(f"prompt {prompt} failed {self._max_attempts} times, at last: {error}"))

    def _give_up(self, error: BaseException) -> None:
        with self._fleet.changed:
            if not self._over:
                self._over = True
                self._done.put(error)
                self._fleet.changed.notify_all()

    def _release(self, index: int) -> Member:
        with self._fleet.changed:
            assigned = self._unfinished.pop(index)
            assigned.member.backlog.tokens -= assigned.tokens
            assigned.member.backlog.samples -= assigned.samples
            self._fleet.changed.notify_all()
            return assigned.member

    # The thread.

    def _run(self) -> None:
        since = time.monotonic()
        try:
            with self._fleet.changed:
                while not self._over and (self.session or self._waiting or self._unfinished):
                    for member, tasks in self._assign().items():
                        self._sessions[member].submit(tasks)
                    if self._unfinished or not self._waiting or self._fleet.ready():
                        since = time.monotonic()
                    else:
                        self._fleet.require_hope(since)
                    self._fleet.changed.wait(0.2)
        except BaseException as error:  # a thread's error must reach the consumer
            self._give_up(error)

    def _assign(self) -> dict[Member, list[Task]]:
        given: dict[Member, list[Task]] = {}
        ready, usable = self._fleet.ready(), set(self._fleet.usable())
        free = {n: [one for one in ready if self._has_room(one, n)] for n in self._sizes}
        # Once a group has finished, most members are full: then no waiting group is looked at.
        while any(free.values()) and (choice := self._choose(free, ready, usable)) is not None:
            index, member = choice
            self._take_out(index)
            task = self._tasks[index]
            owed = len(task.prompt.token_ids) + task.params.n * task.params.max_tokens
            self._unfinished[index] = Assigned(member, owed, task.params.n)
            member.backlog.tokens += owed
            member.backlog.samples += task.params.n
            if self.session:
                self._prefixes.add(task.prompt.token_ids, member)
            given.setdefault(member, []).append(task)
            for n in [*free]:
                if n not in self._sizes:
                    del free[n]
                elif member in free[n] and not self._has_room(member, n):
                    free[n].remove(member)
        return given

    def _take_out(self, index: int) -> None:
        """Remove a group from those that wait."""
        self._waiting.remove(index)
        self._holders.pop(index, None)
        n = self._tasks[index].params.n
        self._sizes[n] -= 1
        if not self._sizes[n]:
            del self._sizes[n]

    def _has_room(self, member: Member, n: int) -> bool:
        """Whether a member takes a group of `n` samples."""
        return member.backlog.samples <= self._max_sequences - n + member.reserve * n

    def _choose(
        self, free: dict[int, list[Member]], ready: Sequence[Member], usable: set[Member]
    ) -> tuple[int, Member] | None:
        """Return the next group that a member has room for, and this member.

        A group returns to a member that failed on it only after all others: a server that answers nonsense is always
        idle and would attract every group. A group whose beginning a busy member holds goes to another one only if no
        other group could.

        Args:
            free: members with room for a group, by its samples.
        """
        second: tuple[int, Member] | None = None
        for index in self._waiting:
            fresh, failed = free[self._tasks[index].params.n], self._failed.get(index, [])
            if failed and usable.difference(failed):
                fresh = [one for one in fresh if one not in failed]
            if not fresh:
                continue
            holder = self._holders.get(index)
            if holder in fresh:
                return index, holder
            least = min(fresh, key=lambda one: one.backlog.tokens)
            if holder is None or holder not in ready or holder in failed:
                return index, least
            second = second or (index, least)
        return second
