"""Scoring in a thread of its own, so that the engine goes on meanwhile."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from r1_rewards.types import RewardInput, Score, Verifier


class ScoringThread:
    """Scores answers in the order in which they come; what comes while it is busy is scored in one call.

    So it suits verifiers only whose scores do not depend on what else is in the call. Used in a `with` block, at whose
    end it stops after the call that it is in; nobody waits for that, so that an interrupt is not held up.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._changed = threading.Condition()
        self._waiting: dict[int, Sequence[RewardInput]] = {}
        self._scores: dict[int, list[Score]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="r1-scoring", daemon=True)

    def put(self, key: int, inputs: Sequence[RewardInput]) -> None:
        """Let `inputs` be scored, to be asked for under `key`."""
        with self._changed:
            if not self._thread.is_alive() and self._error is None:
                self._thread.start()
            self._waiting[key] = inputs
            self._changed.notify_all()

    def scores(self, key: int) -> list[Score]:
        """Wait for the scores of what was put under `key`. Raises what the verifier raised."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._scores or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._scores[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._take():
            try:
                scores = iter(self._verifier([item for inputs in batch.values() for item in inputs]))
                scored = {key: [next(scores) for _ in inputs] for key, inputs in batch.items()}
            except BaseException as error:  # it is raised where the scores are asked for
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= scored
                self._changed.notify_all()

    def _take(self) -> dict[int, Sequence[RewardInput]]:
        """Wait for something to score and return it all; {} at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, self._waiting = self._waiting, {}
            return {} if self._closed else batch
