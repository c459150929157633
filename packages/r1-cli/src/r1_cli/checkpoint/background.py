"""Work beside the run: a thread that does one thing after the other, in the order in which they were asked for."""

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import Queue
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


class Background:
    """A thread that begins with the first thing to do, and never keeps the process from ending."""

    def __init__(self, name: str, room: int) -> None:
        """Name the thread. Whoever asks for more than `room` things that are not begun waits."""
        self._name = name
        self._waiting: Queue[Callable[[], None] | None] = Queue(room)
        self._thread: Thread | None = None

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        """Have something done after all that was asked for before; return what comes of it."""
        future: Future[Result] = Future()
        # Libraries keep in context variables what the thread that opened them has.
        self._waiting.put(partial(copy_context().run, _do, work, future))
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """Let the thread end after what was asked for; does not wait for it."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread = None

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work()
            del work  # and what it holds, before the next one comes


def _do(work: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # is for whoever asks
        future.set_exception(error)
