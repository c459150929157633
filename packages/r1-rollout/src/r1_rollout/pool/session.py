"""A generation session over the members of a pool."""

from collections.abc import Callable, Hashable

from r1_rollout.pool.dispatch import Dispatch
from r1_rollout.session import Finished, SampleKey, SteppedSession
from r1_rollout.types import PromptLike, SamplingParams


class DispatchedRequests:
    """The groups of a `Dispatch` by the keys of their requests."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._indices: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    @property
    def pending(self) -> bool:
        return self._dispatch.pending

    @property
    def prefilled(self) -> int | None:
        return self._dispatch.prefilled

    def submit(self, key: Hashable, prompt: PromptLike, params: SamplingParams, *, split: bool) -> None:
        index = self._dispatch.add(prompt, params, split=split)
        self._indices[key], self._keys[index] = index, key

    def step(self, timeout: float | None = 0) -> list[Finished]:
        finished: list[Finished] = []
        taken = self._dispatch.take(timeout)
        for index, number, completions in taken:
            key = self._keys[index]
            finished.append((key if number is None else SampleKey(key, number), completions))
        for index in {index for index, _, _ in taken}:
            if not self._dispatch.is_open(index):
                del self._indices[self._keys.pop(index)]
        return finished

    def cancel(self, key: Hashable) -> None:
        index = self._indices.pop(key)
        del self._keys[index]
        self._dispatch.cancel(index)

    def close(self) -> None:
        self._dispatch.end("it was closed")


class PoolSession(SteppedSession):
    """A `GenerationSession` whose requests run at the members, whether it is polled or not."""

    def __init__(
        self,
        requests: DispatchedRequests,
        params: SamplingParams,
        submit: Callable[[str, PromptLike, SamplingParams, bool], None],
    ) -> None:
        super().__init__(requests, params, submit)
        self._requests = requests

    @property
    def steps(self) -> int | None:
        return None

    def _step(self, timeout: float | None) -> list[Finished]:
        return self._requests.step(timeout)
