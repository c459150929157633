"""The thread that vLLM lives in, with a deadline for every call, and a pending call to `generate`."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from r1_rollout.errors import EngineError
from r1_rollout.types import Completion

Result = TypeVar("Result")


class EngineThread:
    """Runs calls one after the other, in a thread of its own.

    vLLM in the same process cannot be killed, but a call that outlasts its deadline raises, as does every later one. A
    daemon thread, so that a hanging engine does not block the exit.
    """

    def __init__(self, name: str = "vllm") -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        return self._failure

    def run(self, call: Callable[..., Result], *args: Any, deadline: float) -> Result:
        """Return `call(*args)`, made in the thread; raises what the call raises.

        Raises:
            EngineError: the call outlasted its deadline in seconds, or an earlier one has failed for good.
        """
        if self._failure:
            raise EngineError(self._failure)
        future: Future[Result] = Future()
        self._calls.put((future, call, args))
        try:
            return future.result(timeout=deadline)
        except TimeoutError:
            if future.done():  # the call's own
                raise
        message = f"vLLM has not answered for {deadline:g} s ({call.__name__}): it hangs. Start the run again"
        raise self.fail(message)

    def fail(self, message: str) -> EngineError:
        self._failure = self._failure or message
        return EngineError(message)

    def stop(self) -> None:
        self._failure = self._failure or "the engine is closed"
        self._calls.put(None)
        self._thread.join(timeout=10.0)

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, args = item
            try:
                future.set_result(call(*args))
            except BaseException as error:  # raised where the result is awaited; the thread lives on
                future.set_exception(error)
            del item, future, call, args  # nothing of the last call is kept alive while waiting for the next


class Running:
    """An iterator of finished groups. Once ended, it raises the reason."""

    def __init__(self, groups: Generator[tuple[int, list[Completion]], None, None]) -> None:
        self._groups = groups
        self._done, self._over = False, ""

    def __iter__(self) -> Iterator[tuple[int, list[Completion]]]:
        return self

    def __next__(self) -> tuple[int, list[Completion]]:
        if self._over:
            raise RuntimeError(self._over)
        try:
            return next(self._groups)
        except BaseException:  # the last group has come, or there will be none
            self._done = True
            raise

    def close(self) -> None:
        self._done = True
        self._groups.close()

    def end(self, reason: str) -> None:
        if not self._done:
            self._over = f"this generate() call is over: {reason}"
        self._groups.close()
