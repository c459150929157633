"""A thread that runs tasks one after another."""

from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from queue import Queue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """Runs tasks in order, in a daemon thread that starts with the first task."""

    def __init__(self, name: str, room: int) -> None:
        """Name the thread. `do` blocks while `room` tasks wait."""
        self._name = name
        self._waiting: Queue[tuple[Context, Callable[[], Any], Future[Any]] | None] = Queue(room)
        self._thread: Thread | None = None

    def do(self, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        # Some libraries keep the state of the opening thread in context variables.
        self._waiting.put((copy_context(), work, future))
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after the queued tasks, without waiting for them."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread = None

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            context, work, future = task
            try:
                future.set_result(context.run(work))
            except BaseException as error:  # the future raises it
                future.set_exception(error)
            del task, context, work, future  # frees what they hold before waiting
