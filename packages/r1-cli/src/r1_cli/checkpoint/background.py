"""A thread that runs tasks one after another, and computes without helpers."""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from queue import Full, Queue
from threading import Thread
from typing import Any, TypeVar

from r1_data.workers import compute_alone

Result = TypeVar("Result")
CLOSING = 60.0  # seconds to wait for a free place when a thread is to end


class Background:
    """Runs tasks in order, in a daemon thread that starts with the first task."""

    def __init__(self, name: str, room: int) -> None:
        """Name the thread. `do` blocks while `room` tasks wait."""
        self._name = name
        self._waiting: Queue[tuple[Context, Callable[[], Any], Future[Any]] | None] = Queue(room)
        self._thread: Thread | None = None

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        found = self._put(work, None)
        assert found is not None, "it waits for a free place"
        return found

    def offer(self, work: Callable[[], Result], seconds: float = 0.0) -> "Future[Result] | None":
        """As `do`, but wait at most `seconds` for a free place; return None if there is none."""
        with suppress(Full):
            return self._put(work, seconds)
        return None

    def _put(self, work: Callable[[], Result], seconds: float | None) -> Future[Result]:
        future: Future[Result] = Future()
        # Some libraries keep the state of the opening thread in context variables.
        self._waiting.put((copy_context(), work, future), timeout=seconds, block=seconds != 0.0)
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the queued tasks, without waiting for them."""
        if self._thread is not None:
            with suppress(Full):  # it hangs, and ends with the process
                self._waiting.put(None, timeout=CLOSING)
            self._thread = None

    def _run(self) -> None:
        alone = False
        while (task := self._waiting.get()) is not None:
            context, work, future = task
            try:
                if not alone and "torch" in sys.modules:
                    compute_alone()  # or the main thread's operations would wait for their helpers to wake up
                    alone = True
                future.set_result(context.run(work))
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            del task, context, work, future  # frees what they hold before waiting
