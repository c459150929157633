"""Environments whose answers are recorded, and a stand-in that repeats them instead of calling anything."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Protocol, TypeAlias

from r1_cli.train.episodes.answers import (
    CALL_AGAIN,
    Answer,
    AnswerRecord,
    RecordedAnswer,
    digest,
    write_answers,
)
from r1_cli.train.recorder import Recorder
from r1_data.types import DataError
from r1_rewards.environments.types import Actor, EnvironmentSetup, JsonObject, PolicyTurn, StepResult
from r1_rewards.types import Failure, Score
from r1_rollout.types import GenerationSession


class Environments(Protocol):
    """What answers the policy, see `EnvironmentPool`."""

    setup: EnvironmentSetup
    tools: list[JsonObject]
    scores: bool

    @property
    def kinds(self) -> Mapping[str, Actor]: ...
    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None: ...
    def step(self, key: str, turn: PolicyTurn) -> None: ...
    def finish(self, key: str) -> None: ...
    def cancel(self, key: str) -> None: ...
    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]: ...


# (environments, the engine's session, seed of the call) -> what answers in this call
AnswerSource: TypeAlias = Callable[[Environments, GenerationSession, int], AbstractContextManager[Environments]]


class Requests:
    """What each open episode has asked last: its number of turns, and a digest."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, str]] = {}

    def start(self, key: str) -> None:
        self._open[key] = 0, ""

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._open[key] = self._open[key][0] + 1, digest([turn.text, [asdict(call) for call in turn.calls], turn.cut])

    def drop(self, key: str) -> None:
        self._open.pop(key, None)

    def __getitem__(self, key: str) -> tuple[int, str]:
        return self._open[key]

    def __contains__(self, key: str) -> bool:
        return key in self._open


class RecordingEnvironments:
    """Environments whose answers are noted in the order in which the player used them."""

    def __init__(self, environments: Environments, session: GenerationSession) -> None:
        self.setup, self.tools, self.scores = environments.setup, environments.tools, environments.scores
        self.kinds = environments.kinds
        self.answers: list[RecordedAnswer] = []
        self.version = 0  # of the weights that sampled the turns
        self._environments, self._session, self._requests = environments, session, Requests()

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None:
        self._environments.start(key, row, images, kind=kind)
        self._requests.start(key)

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._environments.step(key, turn)
        self._requests.step(key, turn)

    def finish(self, key: str) -> None:
        self._environments.finish(key)

    def cancel(self, key: str) -> None:
        self._environments.cancel(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]:
        found = self._environments.poll(timeout)
        self.answers += [
            RecordedAnswer(key, *self._requests[key], self._session.steps, answer) for key, answer in found
        ]
        return found


def record_answers(recorder: Recorder) -> AnswerSource:
    """Return what records the answers of each call that ends well."""

    @contextmanager
    def source(environments: Environments, session: GenerationSession, seed: int) -> Iterator[RecordingEnvironments]:
        recording = RecordingEnvironments(environments, session)
        yield recording
        write_answers(recorder, recording.answers, environments.kinds, recording.version, seed)

    return source


class RecordedEnvironments:
    """Repeats the answers of one call: each when the engine has taken as many steps as then.

    Where the engine's steps are not known, an answer comes as soon as it is asked for.
    """

    def __init__(
        self,
        kinds: Mapping[str, Actor],
        answers: Sequence[RecordedAnswer] = (),
        session: GenerationSession | None = None,
    ) -> None:
        self.kinds = kinds
        self.setup, self.tools, self.scores = kinds[""].setup, kinds[""].tools, kinds[""].scores
        self._answers, self._session, self._requests = deque(answers), session, Requests()
        self._asked: set[str] = set()

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None:
        self._requests.start(key)
        self._asked.add(key)

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._requests.step(key, turn)
        self._asked.add(key)

    def finish(self, key: str) -> None:
        self._asked.add(key)

    def cancel(self, key: str) -> None:
        self._requests.drop(key)
        self._asked.discard(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]:
        """Return the answers that are due. Raises DataError if there is none of what an episode asks for."""
        steps = None if self._session is None else self._session.steps
        found, later = dict[str, Answer](), deque[RecordedAnswer]()
        while self._answers:
            one = self._answers.popleft()
            exact = steps is not None and one.steps is not None
            idle = timeout is None and not found  # the engine waits, so the next answer is the one that came then
            ready = one.episode not in found and self._is_ready(one)
            if ready and (not exact or idle or (one.steps or 0) <= (steps or 0)):
                found[one.episode] = self._take(one)
                steps = one.steps if exact and idle else steps
            else:
                later.append(one)
                if exact:
                    break  # the order of answers is that of then
        self._answers.extendleft(reversed(later))
        if timeout is None and self._asked and not found:
            key = min(self._asked)
            raise DataError(f"episode {key}: the record has no answer to turn {self._requests[key][0]}{CALL_AGAIN}")
        return list(found.items())

    def _is_ready(self, one: RecordedAnswer) -> bool:
        """Whether an episode waits for this answer. A failure comes unasked, behind the same turns."""
        if one.episode not in self._requests:
            return False
        asked = one.episode in self._asked or isinstance(one.answer, Failure)
        return asked and self._requests[one.episode][0] == one.turn

    def _take(self, one: RecordedAnswer) -> Answer:
        if self._requests[one.episode][1] != one.request:
            raise DataError(f"episode {one.episode}: turn {one.turn} is not the recorded one{CALL_AGAIN}")
        self._asked.discard(one.episode)
        if isinstance(one.answer, Score | Failure):
            self._requests.drop(one.episode)
        assert isinstance(one.answer, StepResult | Score | Failure)
        return one.answer


def replay_answers(record: AnswerRecord) -> AnswerSource:
    """Return what repeats the recorded answers of each call. It raises DataError if a call is not in the record."""

    @contextmanager
    def source(environments: Environments, session: GenerationSession, seed: int) -> Iterator[RecordedEnvironments]:
        yield RecordedEnvironments(environments.kinds, record.read(seed), session)

    return source
