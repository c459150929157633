"""How much of the time of episodes an engine works, how long it waits for tools, and how many tokens it prefills."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from r1_cli.train.groups.trajectory import Trajectory
from r1_data.types import Prompt
from r1_rollout.types import Completion, GenerationSession


@dataclass(slots=True)
class EngineUse:
    """Sums over the sessions since the last call of `metrics`."""

    whole: float = 0.0  # seconds of the sessions
    busy: float = 0.0  # seconds in which the engine was polled, with a request
    empty: float = 0.0  # seconds of waiting for tools without a request
    prefilled: int = 0  # tokens
    tokens: int = 0  # of episodes, their prompts included, where the engine reports what it prefills

    @contextmanager
    def session(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.whole += time.perf_counter() - begun

    @contextmanager
    def polling(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.busy += time.perf_counter() - begun

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.empty += time.perf_counter() - begun

    def add_tokens(self, session: GenerationSession, groups: Iterable[tuple[Prompt, Sequence[Completion]]]) -> None:
        """Add what a session has prefilled, and the tokens of its episodes."""
        if (prefilled := session.prefilled) is None:
            return
        self.prefilled += prefilled
        for prompt, group in groups:
            for episode in group:
                assert isinstance(episode, Trajectory)
                for path in (episode, *episode.forks):
                    self.tokens += len((path.prompt or prompt).token_ids) + len(path.token_ids)

    def metrics(self) -> dict[str, float]:
        """Return `gen/…` and `timing_s/tools`, and begin anew; {} without episodes."""
        found: dict[str, float] = {}
        if self.whole:
            found |= {"gen/busy": self.busy / self.whole, "timing_s/tools": self.empty}
        if self.tokens:
            found["gen/prefilled_per_token"] = self.prefilled / self.tokens
        self.whole = self.busy = self.empty = 0.0
        self.prefilled = self.tokens = 0
        return found
