"""Score responses: in one call, or in a thread while the engine samples. Report failures once per cause."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from r1_cli.runs.track.stopwatch import Stopwatch
from r1_cli.train.groups.group import Group
from r1_rewards.types import RewardInput, Score, Verifier

log = logging.getLogger("r1")


def score_together(
    verifier: Verifier, order: Sequence[int], inputs: dict[int, list[RewardInput]]
) -> dict[int, list[Score]]:
    if not order:
        return {}
    scores = iter(verifier([item for index in order for item in inputs[index]]))
    return {index: [next(scores) for _ in inputs[index]] for index in order}


def report_failures(scored: Iterable[tuple[Sequence[RewardInput], Sequence[Score]]], shown: set[str]) -> None:
    pairs = [pair for inputs, scores in scored for pair in zip(inputs, scores, strict=True)]
    failed = [(item, score, score.error) for item, score in pairs if score.error]
    counts = Counter(error.cause for _, _, error in failed)
    for item, score, error in failed:
        if error.cause not in shown:
            shown.add(error.cause)
            log.warning(
                "the reward failed on %d of %d responses (%s): %s\n"
                "  first such response: %.300r (ground truth %.100r)\n"
                "  such responses %s; later ones are only counted, in reward/failures",
                counts[error.cause], len(pairs), error.cause, error.message, item.response, item.ground_truth,
                "get worker.reward.failure_score" if score.keep else "leave their groups",
            )  # fmt: skip


def report_unusable_ground_truths(groups: Iterable[Group], shown: set[str]) -> None:
    """Warn once of a prompt whose ground truth no response can match."""
    for group in groups:
        if group.truth_problem and "truth" not in shown:
            shown.add("truth")
            log.warning(
                "no response to %s can be correct: %s\n  `r1 data check` names all such rows; later ones "
                "are only counted, in reward/unusable_truths",
                group.prompt.id, group.truth_problem,
            )  # fmt: skip


class ScoringThread:
    """Scores responses in a thread; one call scores all that arrived during the last.

    Only for verifiers whose scores do not depend on the rest of the call. Leaving the `with` block does not wait, so
    that an interrupt is not delayed.
    """

    def __init__(self, verifier: Verifier, watch: Stopwatch) -> None:
        self._verifier, self._watch = verifier, watch
        self._changed = threading.Condition()
        self._waiting: dict[int, list[RewardInput]] = {}
        self._scores: dict[int, list[Score]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="r1-scoring", daemon=True)

    def put(self, key: int, inputs: Sequence[RewardInput]) -> None:
        with self._changed:
            if not self._thread.is_alive() and self._error is None:
                self._thread.start()
            self._waiting[key] = list(inputs)
            self._changed.notify_all()

    def scores(self, key: int) -> list[Score]:
        """Wait for the scores of `key`. Raises what the verifier raised."""
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
                with self._watch.background("score"):
                    scored = score_together(self._verifier, list(batch), batch)
            except BaseException as error:  # `scores` raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= scored
                self._changed.notify_all()

    def _take(self) -> dict[int, list[RewardInput]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, self._waiting = self._waiting, {}
            return {} if self._closed else batch
