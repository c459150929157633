"""What callers of the embedded engine get: an iterator over groups, and a session whose answers can be read early."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from r1_rollout.embedded.decoding import Decoding
from r1_rollout.embedded.rows import SamplingRequest
from r1_rollout.session import Finished, SteppedSession
from r1_rollout.types import Completion, PromptLike, SamplingParams


class GenerateCall:
    """A `generate` call: an iterator of (index of the prompt, its completions).

    Prompts may be appended while some are unfinished.
    """

    def __init__(
        self,
        decoding: Decoding,
        prompts: Sequence[PromptLike],
        request_of: Callable[[int, PromptLike], SamplingRequest],
    ) -> None:
        """`request_of` returns the request for a prompt of this index; it raises if the prompt cannot be decoded."""
        self._decoding, self._prompts, self._request_of = decoding, prompts, request_of
        self._known = 0  # prompts
        self._drained = False
        self._finished: deque[Finished] = deque()
        self._over = ""  # why there are no more groups, if somebody else decided so
        self._take_up()

    def __iter__(self) -> "GenerateCall":
        return self

    def __next__(self) -> tuple[int, list[Completion]]:
        while self._decoding.closed or not self._finished:
            self._take_up()
            if not self._decoding.pending:
                self.close()
                if self._over:
                    raise RuntimeError(self._over)
                raise StopIteration
            self._finished.extend(self._decoding.step())
        index, completions = self._finished.popleft()
        return cast(int, index), completions

    def _take_up(self) -> None:
        while not self._decoding.closed and not self._drained and self._known < len(self._prompts):
            try:
                self._decoding.submit(self._request_of(self._known, self._prompts[self._known]))
            except BaseException:
                self.close()
                raise
            self._known += 1

    def drain(self) -> None:
        self._drained = True
        self._decoding.drain()

    def close(self) -> None:
        self._decoding.close()
        self._finished.clear()

    def end(self, reason: str) -> None:
        """End the call; if it was incomplete, its iterator raises the reason."""
        if self._finished or self._decoding.pending:
            self._over = f"this generate() call is over: {reason}"
        self.close()


class StreamingSession(SteppedSession):
    """A session whose unfinished answers can be read while they grow."""

    def __init__(
        self,
        decoding: Decoding,
        params: SamplingParams,
        submit: Callable[[str, PromptLike, SamplingParams, bool], None],
    ) -> None:
        super().__init__(decoding, params, submit)
        self._decoding = decoding

    def decoded(self, key: str) -> list[int]:
        """Return the tokens so far of an unfinished request's first sample; [] before its prompt is computed."""
        return self._decoding.decoded(key)
