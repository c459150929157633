"""Generation sessions of engines in this process: requests come and go between the engine's steps."""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Protocol

from r1_rollout.types import Completion, PromptLike, SamplingParams


class Steps(Protocol):
    """The unfinished requests of an engine, which runs them step by step."""

    @property
    def pending(self) -> bool: ...

    def step(self) -> list[tuple[Hashable, list[Completion]]]:
        """Run one step; return the requests that it finished, [] if nothing is pending."""

    def cancel(self, key: Hashable) -> None: ...

    def close(self) -> None: ...


class SteppedSession:
    """A `GenerationSession` whose `poll` runs the engine's steps, in the caller's thread."""

    def __init__(
        self, steps: Steps, params: SamplingParams, submit: Callable[[str, PromptLike, SamplingParams], None]
    ) -> None:
        """`submit` adds a request to `steps`; it raises if the engine cannot process it."""
        self._steps, self._params, self._submit = steps, params, submit
        self._pending: set[str] = set()
        self._taken = 0
        self._over = ""  # why the session has ended

    @property
    def steps(self) -> int | None:
        return self._taken

    def submit(self, key: str, prompt: PromptLike, *, max_tokens: int, n: int = 1, stop: tuple[str, ...] = ()) -> None:
        self._require_open()
        if key in self._pending:
            raise ValueError(f"{key} is pending already: a key names one request at a time")
        self._submit(key, prompt, request_params(self._params, max_tokens, n, stop))
        self._pending.add(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open()
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._taken += 1
                finished = [(str(key), completions) for key, completions in self._step(left)]
            except BaseException as error:
                self.end(f"a step failed ({type(error).__name__})")
                raise
            self._require_open()
            self._pending.difference_update(key for key, _ in finished)
            if finished or not self._steps.pending or (until is not None and time.monotonic() >= until):
                return finished

    def _step(self, timeout: float | None) -> list[tuple[Hashable, list[Completion]]]:
        """Run one step, or wait up to `timeout` seconds for an engine that runs by itself."""
        return self._steps.step()

    def cancel(self, key: str) -> None:
        if key in self._pending:
            self._pending.discard(key)
            self._steps.cancel(key)

    def close(self) -> None:
        self.end("it was closed")

    def end(self, reason: str) -> None:
        self._over = self._over or reason
        self._pending.clear()
        self._steps.close()

    def _require_open(self) -> None:
        if self._over:
            raise RuntimeError(f"this session is over: {self._over}")


def request_params(params: SamplingParams, max_tokens: int, n: int, stop: tuple[str, ...]) -> SamplingParams:
    """Return the parameters of one request of a session. Raises ValueError if it exceeds the session's `max_tokens`."""
    if max_tokens > params.max_tokens:
        raise ValueError(f"max_tokens={max_tokens} of a request is over the session's {params.max_tokens}")
    return replace(params, max_tokens=max_tokens, n=n, stop=(*params.stop, *stop))
