"""Generation sessions of engines in this process: requests come and go between the engine's steps."""

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeAlias

from r1_rollout.types import Completion, PromptLike, SamplingParams


class SampleKey(NamedTuple):
    """One sample of a request whose samples are returned one by one."""

    request: Hashable
    number: int


# The key of a request, or a `SampleKey`, and what has finished of it.
Finished: TypeAlias = tuple[Hashable, list[Completion]]


class Steps(Protocol):
    """The unfinished requests of an engine, which runs them step by step."""

    @property
    def pending(self) -> bool: ...

    @property
    def prefilled(self) -> int | None:
        """See `GenerationSession.prefilled`."""

    def step(self) -> list[Finished]:
        """Run one step; return the requests and samples that it finished, [] if nothing is pending."""

    def cancel(self, key: Hashable) -> None: ...

    def close(self) -> None: ...


class SteppedSession:
    """A `GenerationSession` whose `poll` runs the engine's steps, in the caller's thread."""

    def __init__(
        self, steps: Steps, params: SamplingParams, submit: Callable[[str, PromptLike, SamplingParams, bool], None]
    ) -> None:
        """`submit` adds a request to `steps`, split or not; it raises if the engine cannot process it."""
        self._steps, self._params, self._submit = steps, params, submit
        self._pending: dict[str, int] = {}  # how many results of a request are missing
        self._taken = 0
        self._over = ""  # why the session has ended

    @property
    def steps(self) -> int | None:
        return self._taken

    @property
    def prefilled(self) -> int | None:
        return self._steps.prefilled

    def submit(
        self,
        key: str,
        prompt: PromptLike,
        *,
        max_tokens: int,
        n: int = 1,
        stop: tuple[str, ...] = (),
        split: bool = False,
    ) -> None:
        self._require_open()
        if key in self._pending:
            raise ValueError(f"{key} is pending already: a key names one request at a time")
        self._submit(key, prompt, request_params(self._params, max_tokens, n, stop), split)
        self._pending[key] = n if split else 1

    def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open()
            try:
                left = None if until is None else max(0.0, until - time.monotonic())
                self._taken += 1
                finished = self._step(left)
            except BaseException as error:
                self.end(f"a step failed ({type(error).__name__})")
                raise
            self._require_open()
            if finished or not self._steps.pending or (until is not None and time.monotonic() >= until):
                return [(self._name(key), completions) for key, completions in finished]

    def _name(self, key: Hashable) -> str:
        request = str(key.request if isinstance(key, SampleKey) else key)
        self._pending[request] -= 1
        if not self._pending[request]:
            del self._pending[request]
        return f"{request}/{key.number}" if isinstance(key, SampleKey) else request

    def _step(self, timeout: float | None) -> list[Finished]:
        """Run one step, or wait up to `timeout` seconds for an engine that runs by itself."""
        return self._steps.step()

    def cancel(self, key: str) -> None:
        if key in self._pending:
            del self._pending[key]
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
