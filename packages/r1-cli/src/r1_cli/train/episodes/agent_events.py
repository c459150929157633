"""What agents do in a sampling call, as one sequence of events: live, recorded, and repeated from the record."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeAlias

from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_cli.train.episodes.answers import Answer
from r1_cli.train.episodes.engine_use import EngineUse
from r1_data.types import Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import StepResult
from r1_rollout.types import Completion, GenerationSession

if TYPE_CHECKING:
    from r1_cli.gateway.server import GatewayServer

IDLE_SECONDS = 0.02  # between two looks at which agents have ended, while none waits for a turn
POLL_SECONDS = 0.01  # between two looks at the agents, with an engine that runs by itself
SKIPPED = 4  # occasions to wait for further requests, after a wait that brought none
OVER = "the episode is over"

Sent: TypeAlias = tuple[str, ChatRequest, Future[ChatReply]] | tuple[str, float]


@dataclass(frozen=True, slots=True)
class Requested:
    """An agent asks for a turn. `key` is of its episode, as in the other events."""

    key: str
    request: ChatRequest
    future: "Future[ChatReply]"


@dataclass(frozen=True, slots=True)
class Rewarded:
    key: str
    value: float


@dataclass(frozen=True, slots=True)
class Ended:
    """An agent has ended by itself (StepResult), with a reward (Score), or has failed."""

    key: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Sampled:
    """The engine has sampled a turn. `request` is its id: the key of the episode, "/", and the number of the turn."""

    request: str
    completion: Completion


Event: TypeAlias = Requested | Rewarded | Ended | Sampled


class Agents(Protocol):
    """The agents of a sampling call, and the turns that the engine samples for them."""

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object]) -> None: ...

    def stop(self, key: str) -> None:
        """End an agent, if it still runs, and refuse its further requests."""

    def submit(self, prompt: Prompt, *, max_tokens: int, stop: tuple[str, ...]) -> None:
        """Sample a turn, whose request is the prompt's id. Raises as `GenerationSession.submit`."""

    def cancel(self, request: str) -> None:
        """Abandon a turn. One that is not being sampled is ignored."""

    def poll(self) -> Iterator[Event]:
        """Wait a short time for events, and yield them. The caller handles each before it takes the next."""

    def close(self) -> None:
        """End all agents and the engine's session."""


# (the engine's session, its use, seed of the call) -> the agents of this call
AgentSource: TypeAlias = Callable[[GenerationSession, EngineUse, int], AbstractContextManager[Agents]]


class EngineTurns:
    """The turns that an engine samples."""

    def __init__(self, session: GenerationSession, use: EngineUse) -> None:
        self.session, self._use = session, use
        self.pending: set[str] = set()  # ids of requests

    def submit(self, prompt: Prompt, *, max_tokens: int, stop: tuple[str, ...]) -> None:
        self.session.submit(prompt.id, prompt, max_tokens=max_tokens, stop=stop)
        self.pending.add(prompt.id)

    def cancel(self, request: str) -> None:
        self.pending.discard(request)
        self.session.cancel(request)

    def poll_engine(self, timeout: float) -> list[Sampled]:
        if not self.pending:
            return []
        with self._use.polling():
            finished = self.session.poll(timeout)
        self.pending.difference_update(request for request, _ in finished)
        return [Sampled(request, completion) for request, (completion,) in finished]


# --- live -------------------------------------------------------------------------------------------------------------


class RequestQueue:
    """What agents send, from the server's thread to the engine's."""

    def __init__(self) -> None:
        self.items: SimpleQueue[Sent] = SimpleQueue()

    def answer(self, session_id: str, request: ChatRequest) -> "Future[ChatReply]":
        future: Future[ChatReply] = Future()
        self.items.put((session_id, request, future))
        return future

    def reward(self, session_id: str, value: float) -> None:
        self.items.put((session_id, value))


class LiveAgents(EngineTurns):
    """Agents in processes of their own, and the server that they send requests to."""

    def __init__(
        self,
        pool: EnvironmentPool,
        server: "GatewayServer",
        queue: RequestQueue,
        session: GenerationSession,
        use: EngineUse,
    ) -> None:
        """`server` puts what agents send into `queue`."""
        super().__init__(session, use)
        self._pool, self._server, self._queue = pool, server, queue
        self._sessions: dict[str, str] = {}  # key of the episode, by the id of the server's session
        self._step_seconds = 0.0  # of the latest decoding step, if the engine runs in this process
        self._skips = 0  # see SKIPPED

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object]) -> None:
        id_ = uuid.uuid4().hex  # what an agent of an earlier call sends late is of no other episode
        self._sessions[id_] = key
        address = self._server.open(id_)
        self._pool.start(key, row, images, {"base_url": address.base_url, "api_key": address.api_key})

    def stop(self, key: str) -> None:
        self._pool.cancel(key)
        for id_ in [id_ for id_, one in self._sessions.items() if one == key]:
            self._server.close_session(id_)
            del self._sessions[id_]

    def poll(self) -> Iterator[Event]:
        ended, known = self._pool.poll(0.0), {*self.pending}
        seconds = 0.0 if self.pending or ended else IDLE_SECONDS
        yield from self._read_queue(seconds)  # also a reward that was sent before the end
        for key, answer in ended:
            if isinstance(answer, StepResult):
                self._pool.finish(key)
            yield Ended(key, answer)
        if self.pending - known:
            yield from self._wait_for_others()
        begun, steps_here = time.perf_counter(), self.session.steps is not None
        sampled = self.poll_engine(0.0 if steps_here else POLL_SECONDS)
        if not self.pending - known:
            self._step_seconds = time.perf_counter() - begun if steps_here else 0.0
        yield from sampled

    def _wait_for_others(self) -> Iterator[Event]:
        """Give other agents the time of one decoding step to ask, too, when one has.

        Requests that enter together are prefilled in one batch, and decode together. An engine that runs by itself
        batches by itself.
        """
        if self._skips:
            self._skips -= 1
            return
        first, until = len(self.pending), time.perf_counter() + self._step_seconds
        while len(self.pending) < len(self._sessions) and (left := until - time.perf_counter()) > 0:
            yield from self._read_queue(left)
        if first == len(self.pending) < len(self._sessions):
            self._skips = SKIPPED

    def close(self) -> None:
        self.session.close()
        for key in [*self._sessions.values()]:
            self.stop(key)
        for _ in self._read_queue(0.0):  # whose sessions are over
            pass

    def _read_queue(self, timeout: float) -> Iterator[Event]:
        """Yield everything that agents have sent; wait up to `timeout` seconds for the first."""
        while (item := self._next(timeout)) is not None:
            timeout = 0.0
            key = self._sessions.get(item[0])
            if len(item) == 3:
                if key is None:
                    item[2].set_exception(GatewayError(404, OVER))
                else:
                    yield Requested(key, item[1], item[2])
            elif key is not None:
                yield Rewarded(key, item[1])

    def _next(self, timeout: float) -> Sent | None:
        items = self._queue.items
        with suppress(Empty):
            if not timeout:
                return items.get_nowait()
            with nullcontext() if self.pending else self._use.waiting():
                return items.get(timeout=timeout)
        return None


def live_agents(pool: EnvironmentPool, server: "GatewayServer", queue: RequestQueue) -> AgentSource:
    """Return what runs the agents of a call in `pool`."""

    @contextmanager
    def source(session: GenerationSession, use: EngineUse, seed: int) -> Iterator[LiveAgents]:
        yield LiveAgents(pool, server, queue, session, use)

    return source
