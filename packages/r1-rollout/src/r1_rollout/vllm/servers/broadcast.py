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
    """The meeting place of the thread that makes the buckets and of the subscribers, one for each server."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._subscribed: set[Subscriber] = set()
        self._busy: set[Subscriber] = set()  # that have not asked for the next bucket yet
        self._turn = 0
        self._bucket: Bucket | None = None  # of this turn; None at the end
        self._broken = False

    def join(self) -> "Subscriber":
        """Add a subscriber, before the first bucket is made."""
        subscriber = Subscriber(self)
        with self._changed:
            self._subscribed.add(subscriber)
            self._busy.add(subscriber)
        return subscriber

    def through(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Pass `buckets` on to the subscribers and, at the same time, to whoever iterates over this.

        The first is made when every subscriber has asked for it or left, a later one when all are done with the last.
        """
        self._wait()
        for bucket in buckets:
            self._next(bucket)
            yield bucket
            self._wait()

    def end(self, *, broken: bool = False) -> None:
        """Let the subscribers' iterators end, or raise BrokenOff."""
        self._broken = broken
        self._next(None)

    def take(self, subscriber: "Subscriber", turn: int) -> Bucket | None:
        """Return the bucket that comes after turn `turn`, None at the end; waits for it. Raises BrokenOff."""
        with self._changed:
            self._busy.discard(subscriber)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn > turn)
            if self._broken:
                raise BrokenOff("the sender's weights broke off")
            return self._bucket

    def leave(self, subscriber: "Subscriber") -> None:
        """Wait for this subscriber no longer."""
        with self._changed:
            self._subscribed.discard(subscriber)
            self._busy.discard(subscriber)
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def _next(self, bucket: Bucket | None) -> None:
        with self._changed:
            self._bucket = bucket
            self._turn += 1
            self._busy = set(self._subscribed)
            self._changed.notify_all()


class Subscriber:
    """One server's place in a broadcast: iterate for its buckets, and leave the block so that nobody waits for it."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def __enter__(self) -> "Subscriber":
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
