"""One pass over the weights that many servers follow: each bucket is made once, and dropped when all have taken it."""

from collections.abc import Iterable, Iterator
from threading import Condition
from types import TracebackType
from typing import TypeAlias

from torch import Tensor

Bucket: TypeAlias = list[tuple[str, Tensor]]


class BrokenOff(Exception):
    """The weights ended early, for a reason that lies with the sender."""


class Broadcast:
    """The meeting place of the thread that makes the buckets and of the followers, one for each server."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._following: set[Follower] = set()
        self._busy: set[Follower] = set()  # that have not asked for the next bucket yet
        self._turn = 0
        self._bucket: Bucket | None = None  # of this turn; None at the end
        self._broken = False

    def join(self) -> "Follower":
        """Add a follower, before the first bucket is made."""
        follower = Follower(self)
        with self._changed:
            self._following.add(follower)
            self._busy.add(follower)
        return follower

    def through(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Pass `buckets` on to the followers and, at the same time, to whoever iterates over this.

        The first is made when every follower has asked for it or left, a later one when all are done with the last.
        """
        self._wait()
        for bucket in buckets:
            self._next(bucket)
            yield bucket
            self._wait()

    def end(self, *, broken: bool = False) -> None:
        """Let the followers' iterators end, or raise BrokenOff."""
        self._broken = broken
        self._next(None)

    def take(self, follower: "Follower", turn: int) -> Bucket | None:
        """Return the bucket that comes after turn `turn`, None at the end; waits for it. Raises BrokenOff."""
        with self._changed:
            self._busy.discard(follower)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn > turn)
            if self._broken:
                raise BrokenOff("the sender's weights broke off")
            return self._bucket

    def leave(self, follower: "Follower") -> None:
        """Wait for this follower no longer."""
        with self._changed:
            self._following.discard(follower)
            self._busy.discard(follower)
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _next(self, bucket: Bucket | None) -> None:
        with self._changed:
            self._bucket = bucket
            self._turn += 1
            self._busy = set(self._following)
            self._changed.notify_all()


class Follower:
    """One server's place in a broadcast: iterate for its buckets, and leave the block so that nobody waits for it."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broadcast.leave(self)

    def __iter__(self) -> Iterator[Bucket]:
        turn = 0
        while (bucket := self._broadcast.take(self, turn)) is not None:
            turn += 1
            yield bucket
