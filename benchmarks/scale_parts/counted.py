"""Processes that are not there: groups of stand-ins that count messages, and the bytes that a driver would move."""

import pickle
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import Any


def bytes_of(value: Any) -> int:
    """Return the bytes of a value's pickle, without copying its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


@dataclass
class Traffic:
    """What goes through the driver: a message is one call of one process."""

    messages: Counter[str] = field(default_factory=Counter)  # by verb
    sent: int = 0  # bytes of requests, once for each process that gets one
    returned: int = 0  # bytes of results
    stored: int = 0  # bytes that the driver has put into the object store
    turn: Lock = field(default_factory=Lock)

    def add(self, verb: str, request: Any, results: list[Any]) -> None:
        """Add one request to as many processes as there are results."""
        sent, returned = bytes_of(request) * len(results), sum(map(bytes_of, results))
        with self.turn:
            self.messages[verb] += len(results)
            self.sent += sent
            self.returned += returned

    def put(self, value: Any) -> "Kept":
        size = bytes_of(value)
        with self.turn:
            self.stored += size
        return Kept(value)

    @property
    def through_driver(self) -> int:
        return self.sent + self.returned + self.stored


@dataclass
class Kept:
    """A value in an object store. It pickles as a reference does, without the value."""

    value: Any

    def load(self) -> Any:
        return self.value

    def __reduce__(self) -> tuple[type, tuple[None]]:
        return Kept, (None,)
