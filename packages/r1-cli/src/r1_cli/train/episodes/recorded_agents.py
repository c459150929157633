"""Agents whose messages are recorded, and a stand-in that repeats them instead of running any."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from r1_cli.gateway.messages import ChatRequest
from r1_cli.train.episodes.agent_events import (
    POLL_SECONDS,
    Agents,
    AgentSource,
    Ended,
    EngineTurns,
    Event,
    Requested,
    Rewarded,
    Sampled,
)
from r1_cli.train.episodes.answers import AnswerRecord, Content, RecordedAnswer, write_answers
from r1_cli.train.episodes.engine_use import EngineUse
from r1_cli.train.recorder import Recorder
from r1_data.types import DataError
from r1_rewards.environments.types import Actor
from r1_rollout.types import Completion, GenerationSession

Part = TypeVar("Part")
RUN_AGAIN = "; `r1 replay --tools again` runs the agents instead of the record"


class RecordingAgents:
    """Agents whose events are noted in the order in which the player handled them."""

    def __init__(self, agents: Agents, session: GenerationSession) -> None:
        self.answers: list[RecordedAnswer] = []
        self.version = 0  # of the weights that sampled the latest turn
        self._agents, self._session = agents, session
        self._turns: Counter[str] = Counter()  # of the policy, by episode
        self._digests: dict[str, str] = {}  # of the events so far, by episode
        self._parts: dict[tuple[str, int], list[object]] = {}  # known messages, by episode and place; tools at -1
        self.start, self.stop, self.close = agents.start, agents.stop, agents.close
        self.submit, self.cancel = agents.submit, agents.cancel

    def poll(self) -> Iterator[Event]:
        for event in self._agents.poll():
            self.answers.append(self._note(event))
            yield event

    def _note(self, event: Event) -> RecordedAnswer:
        steps = self._session.steps
        if isinstance(event, Sampled):
            key, _, number = event.request.rpartition("/")
            self.version, digest = event.completion.weight_version, digest_turn(event.completion)
            self._turns[key] += 1
            self._extend_digest(key, digest)
            return RecordedAnswer(key, int(number), digest, steps, None)
        key, before = event.key, self._digests.get(event.key, "")
        self._extend_digest(key, type(event).__name__)
        match event:
            case Requested():
                answer: Content = self._shared(key, event.request)
            case Rewarded():
                answer = event.value
            case Ended():
                answer = event.answer
        return RecordedAnswer(key, self._turns[key], before, steps, answer)

    def _extend_digest(self, key: str, text: str) -> None:
        whole = self._digests.get(key, "") + text
        self._digests[key] = hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()

    def _shared(self, key: str, request: ChatRequest) -> ChatRequest:
        """Return the request with the messages and tools of earlier ones, so that each is kept once."""
        messages = tuple(self._known(key, place, message) for place, message in enumerate(request.messages))
        return replace(request, messages=messages, tools=self._known(key, -1, request.tools))

    def _known(self, key: str, place: int, part: Part) -> Part:
        known = self._parts.setdefault((key, place), [])
        for other in known:
            if other == part and isinstance(other, type(part)):
                return other
        known.append(part)
        return part


def record_agents(agents: AgentSource, kinds: Mapping[str, Actor], recorder: Recorder) -> AgentSource:
    """Return the agents so that the events of each call that ends well are recorded."""

    @contextmanager
    def source(session: GenerationSession, use: EngineUse, seed: int) -> Iterator[RecordingAgents]:
        with agents(session, use, seed) as live:
            recording = RecordingAgents(live, session)
            yield recording
            write_answers(recorder, recording.answers, kinds, recording.version, seed)

    return source


class RecordedAgents(EngineTurns):
    """Repeats the events of one call in their order, each when the engine has taken as many steps as then.

    Where the engine's steps are not known, an event comes as soon as those before it have come.
    """

    def __init__(self, events: Sequence[RecordedAnswer], session: GenerationSession, use: EngineUse) -> None:
        super().__init__(session, use)
        self._events = deque(events)
        self._open: set[str] = set()  # keys of episodes
        self._sampled: dict[str, Completion] = {}  # turns that wait for their place in the order

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object]) -> None:
        self._open.add(key)

    def stop(self, key: str) -> None:
        self._open.discard(key)

    def cancel(self, request: str) -> None:
        super().cancel(request)
        self._sampled.pop(request, None)

    def poll(self) -> Iterator[Event]:
        """See `Agents.poll`. Raises DataError if the policy's turns are not the recorded ones."""
        idle = True
        while self._events and self._is_due(self._events[0]):
            idle = False
            yield self._repeat(self._events.popleft())
        if not (idle or self.pending):
            return
        if not self.pending:
            raise DataError(
                f"episode {min(self._open, default='?')}: the record has no further request of its agent{RUN_AGAIN}"
            )
        seconds = POLL_SECONDS if self.session.steps is None else 0.0
        self._sampled |= {one.request: one.completion for one in self.poll_engine(seconds)}

    def close(self) -> None:
        self.session.close()

    def _is_due(self, one: RecordedAnswer) -> bool:
        if one.answer is None:
            return _request_of(one) in self._sampled
        steps = self.session.steps
        exact = steps is not None and one.steps is not None
        return one.episode in self._open and (not exact or not self.pending or (one.steps or 0) <= (steps or 0))

    def _repeat(self, one: RecordedAnswer) -> Event:
        match one.answer:
            case None:
                completion = self._sampled.pop(_request_of(one))
                if digest_turn(completion) != one.request:
                    raise DataError(f"episode {one.episode}: turn {one.turn} is not the recorded one{RUN_AGAIN}")
                return Sampled(_request_of(one), completion)
            case ChatRequest():
                return Requested(one.episode, one.answer, Future())
            case float():
                return Rewarded(one.episode, one.answer)
        return Ended(one.episode, one.answer)


def replay_agents(record: AnswerRecord) -> AgentSource:
    """Return what repeats the recorded events of each call. It raises DataError if a call is not in the record."""

    @contextmanager
    def source(session: GenerationSession, use: EngineUse, seed: int) -> Iterator[RecordedAgents]:
        yield RecordedAgents(record.read(seed), session, use)

    return source


def _request_of(turn: RecordedAnswer) -> str:
    return f"{turn.episode}/{turn.turn}"


def digest_turn(completion: Completion) -> str:
    """Return 16 characters that turns of equal tokens share."""
    return hashlib.blake2b(completion.token_ids.tobytes(), digest_size=8).hexdigest()
