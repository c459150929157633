"""Many episodes' tools and environments at once, in worker processes."""

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

from r1_rewards.environments.scheduler import Command, Scheduler
from r1_rewards.environments.session import Answer, EpisodeSession, Kind, load_kind
from r1_rewards.environments.types import EnvironmentSetup, JsonObject, PolicyTurn, StepResult
from r1_rewards.types import Failure, Score
from r1_rewards.workers.frames import check_json, encode_picture

MAX_PICTURES = 64  # whose encoded form is kept


class EnvironmentPool:
    """Runs an environment, tools, or an agent for many open episodes; nothing but `poll` and `close` waits.

    Each `start` and `step` gets one answer from `poll`: a StepResult, or a Failure, which ends the episode. `finish`
    gets a Score or a Failure if `scores`, else nothing. An episode over its time limit gets a Failure unasked. After a
    Score, a Failure or `cancel` the key is free again.

    An agent runs from `start` to its end. Then `poll` returns the Score that it returned, a StepResult without one, or
    a Failure; between them it talks to the policy by itself.

    `tools` has the schemas that the policy sees; it is empty if the environment reads the text of turns. `scores` tells
    whether the environment judges its episodes, `deterministic` whether it promises equal answers to equal turns. These
    are of the setup; `kinds` has them for `others`, too, and for the setup under the name "".
    """

    def __init__(
        self,
        setup: EnvironmentSetup,
        *,
        workers: int = 1,
        others: Mapping[str, EnvironmentSetup] = MappingProxyType({}),
        overlap: bool = True,
    ) -> None:
        """Load the code in a new process. `workers` compute at a time; those that wait for something do not count.

        Without `overlap` they count, so that tools of one worker are called in one process, one call after another.

        `others` are further setups by name, with the limits of `setup`, for episodes that name them.

        Raises EnvironmentSpecError if the tools or the environment cannot be loaded.
        """
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        timeout = (setup.agent and setup.episode_timeout) or setup.tool_timeout
        self.kinds: dict[str, Kind] = {}
        try:
            for name, one in {"": setup, **others}.items():
                self.kinds[name] = load_kind(one, 4 * timeout * (os.cpu_count() or 1))
        except BaseException:
            self._close_servers()
            raise
        self.setup, self.tools = setup, self.kinds[""].tools
        self.scores, self.deterministic = self.kinds[""].scores, self.kinds[""].loaded.deterministic
        self._sessions: dict[str, EpisodeSession] = {}
        self._asked: set[EpisodeSession] = set()  # without an answer
        self._answers: deque[tuple[EpisodeSession, Answer]] = deque()
        self._arrived = threading.Condition()
        self._pictures: dict[
            int, tuple[object, JsonObject]
        ] = {}  # by id, with the picture so that the id stays its own
        self._serial = 0
        self._closed = False
        self._fault: BaseException | None = None
        self._scheduler = Scheduler(workers, timeout, setup.episode_timeout, self._deliver, overlap=overlap)
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    def start(
        self,
        key: str,
        row: Mapping[str, object],
        images: Sequence[object] = (),
        address: Mapping[str, str] = MappingProxyType({}),
        kind: str = "",
    ) -> None:
        """Open an episode: `reset` is called, or the agent begins. What `reset` returns is the StepResult's message.

        `address` has the `base_url` and `api_key` of an agent's server; `kind` is one of `kinds`.

        Raises TypeError for columns that are not JSON values, and ValueError if `key` is open.
        """
        if key in self._sessions:
            raise ValueError(f"the episode {key!r} is open")
        check_json(row, f"row of the episode {key!r}")
        chosen = self.kinds[kind]
        pictures = [self._encode(image) for image in images] if chosen.loaded.wants_pictures else []
        self._serial += 1
        session = EpisodeSession(key, self._serial, dict(row), pictures, chosen, address=address)
        self._sessions[key] = session
        self._ask(session, "start")

    def step(self, key: str, turn: PolicyTurn) -> None:
        """Answer a turn: execute its calls, or let the environment read its text. Raises KeyError if it is not open."""
        self._ask(self._sessions[key], "step", turn)

    def finish(self, key: str) -> None:
        """Ask for the environment's score, if it has one, and close the episode. Raises KeyError if it is not open."""
        session = self._sessions[key]
        if session.kind.scores:
            self._ask(session, "finish")
        else:
            del self._sessions[key]
            self._scheduler.send(Command(session, "finish"))

    def cancel(self, key: str) -> None:
        """Close an episode, whatever it does; no answer follows. A key that is not open is ignored."""
        session = self._sessions.pop(key, None)
        if session is not None:
            with self._arrived:
                self._asked.discard(session)
                self._answers = deque(item for item in self._answers if item[0] is not session)
            self._scheduler.send(Command(session, "cancel"))

    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]:
        """Return what has been answered, at most one answer per key.

        Waits up to `timeout` seconds for the first; None waits until there is one, and not at all if nothing was asked.
        """
        if timeout == 0 and not self._answers and self._fault is None:
            return []
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._answers or self._fault or (timeout is None and not self._asked), timeout
            )
            if self._fault is not None:
                raise RuntimeError("the thread that runs the environments has ended") from self._fault
            found, later = dict[str, Answer](), deque[tuple[EpisodeSession, Answer]]()
            while self._answers:
                session, answer = self._answers.popleft()
                if session.key in found:
                    later.append((session, answer))
                elif self._sessions.get(session.key) is session:
                    found[session.key] = answer
                    if isinstance(answer, Score | Failure):
                        del self._sessions[session.key]
            self._answers = later
        return list(found.items())

    def pids(self) -> list[int]:
        return [pid for kind in self.kinds.values() for pid in kind.server.pids()]

    def close(self) -> None:
        """Kill all workers and what they started."""
        if self._closed:
            return
        self._closed = True
        self._scheduler.stop()
        for kind in self.kinds.values():
            kind.server.close()
        self._thread.join()
        self._close_servers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close_servers(self) -> None:
        for kind in self.kinds.values():
            kind.server.close()
            kind.server.dispose()

    def _ask(self, session: EpisodeSession, kind: str, turn: PolicyTurn | None = None) -> None:
        with self._arrived:
            if session in self._asked:
                raise ValueError(f"the episode {session.key!r} has not answered yet")
            waiting = [answer for one, answer in self._answers if one is session]
            if any(isinstance(answer, StepResult) for answer in waiting):
                raise ValueError(f"the episode {session.key!r} has an answer that was not polled")
            if not waiting:  # else it has failed meanwhile
                self._asked.add(session)
        self._scheduler.send(Command(session, kind, turn))

    def _encode(self, image: object) -> JsonObject:
        """The episodes of a group share their pictures: each is encoded once, while it is in use."""
        if id(image) not in self._pictures:
            if len(self._pictures) >= MAX_PICTURES:
                self._pictures.clear()
            self._pictures[id(image)] = image, dict(encode_picture(image, {}))
        return self._pictures[id(image)][1]

    def _deliver(self, session: EpisodeSession, answer: Answer) -> None:
        with self._arrived:
            self._asked.discard(session)
            if self._sessions.get(session.key) is session:  # not cancelled: nobody waits for such an answer
                self._answers.append((session, answer))
                self._arrived.notify_all()

    def _run(self) -> None:
        try:
            self._scheduler.run()
        except BaseException as error:
            with self._arrived:
                self._fault = None if self._closed else error
                self._arrived.notify_all()
