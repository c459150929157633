"""A generation session over the members of a pool."""

from collections.abc import Callable, Hashable

from r1_rollout.pool.dispatch import Dispatch
from r1_rollout.session import SteppedSession
from r1_rollout.types import Completion, PromptLike, SamplingParams


class DispatchedRequests:
    """The groups of a `Dispatch` by the keys of their requests."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._indices: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    @property
    def pending(self) -> bool:
        return self._dispatch.pending

    def submit(self, key: Hashable, prompt: PromptLike, params: SamplingParams) -> None:
        index = self._dispatch.add(prompt, params)
        self._indices[key], self._keys[index] = index, key

    def step(self, timeout: float | None = 0) -> list[tuple[Hashable, list[Completion]]]:
        finished = [(self._keys.pop(index), completions) for index, completions in self._dispatch.take(timeout)]
        for key, _ in finished:
            del self._indices[key]
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
        submit: Callable[[str, PromptLike, SamplingParams], None],
    ) -> None:
        super().__init__(requests, params, submit)
        self._requests = requests

    @property
    def steps(self) -> int | None:
        return None

    def _step(self, timeout: float | None) -> list[tuple[Hashable, list[Completion]]]:
        return self._requests.step(timeout)
