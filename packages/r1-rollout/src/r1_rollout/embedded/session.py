"""A generation session of the embedded engine: requests may come and go between decoding steps."""

import time
from collections.abc import Callable
from dataclasses import replace

from r1_rollout.embedded.decoding import Decoding
from r1_rollout.embedded.rows import Request
from r1_rollout.types import Completion, PromptLike, SamplingParams


class EmbeddedSession:
    """A `GenerationSession` whose `poll` runs the decoding steps, in the caller's thread."""

    def __init__(
        self,
        decoding: Decoding,
        params: SamplingParams,
        request_of: Callable[[str, PromptLike, SamplingParams], Request],
    ) -> None:
        """`request_of` returns the request for a key, its prompt and its parameters; it raises if it is impossible."""
        self._decoding, self._params, self._request_of = decoding, params, request_of
        self._pending: set[str] = set()
        self._over = ""  # why the session has ended

    def submit(self, key: str, prompt: PromptLike, *, max_tokens: int, n: int = 1, stop: tuple[str, ...] = ()) -> None:
        self._require_open()
        if key in self._pending:
            raise ValueError(f"{key} is pending already: a key names one request at a time")
        params = turn_params(self._params, max_tokens, n, stop)
        self._decoding.submit(self._request_of(key, prompt, params))
        self._pending.add(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, list[Completion]]]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._require_open()
            try:
                finished = [(str(key), completions) for key, completions in self._decoding.step()]
            except BaseException as error:
                self.end(f"a step failed ({type(error).__name__})")
                raise
            self._require_open()
            self._pending.difference_update(key for key, _ in finished)
            if finished or not self._decoding.pending or (until is not None and time.monotonic() >= until):
                return finished

    def cancel(self, key: str) -> None:
        self._pending.discard(key)
        self._decoding.cancel(key)

    def close(self) -> None:
        self.end("it was closed")

    def end(self, reason: str) -> None:
        self._over = self._over or reason
        self._decoding.close()

    def _require_open(self) -> None:
        if self._over:
            raise RuntimeError(f"this session is over: {self._over}")


def turn_params(params: SamplingParams, max_tokens: int, n: int, stop: tuple[str, ...]) -> SamplingParams:
    """Return the parameters of one request of a session. Raises ValueError if it exceeds the session's `max_tokens`."""
    if max_tokens > params.max_tokens:
        raise ValueError(f"max_tokens={max_tokens} of a request is over the session's {params.max_tokens}")
    return replace(params, max_tokens=max_tokens, n=n, stop=(*params.stop, *stop))
