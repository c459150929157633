"""Run the jobs of open episodes on worker processes, in a thread, each within its seconds.

A stateful environment has a worker of its own; tools without a state run on any. `workers` bounds those that compute at
a time; a worker whose whole process tree sleeps, as during a request over a network, does not count.
"""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from r1_rewards.environments.session import Answer, CallJob, EpisodeSession, digest
from r1_rewards.environments.types import PolicyTurn, StepResult
from r1_rewards.types import Failure, RewardSpecError
from r1_rewards.workers.batch import seconds_waited
from r1_rewards.workers.descendants import computes
from r1_rewards.workers.process import SEND_TIMEOUT, ForkServer, Worker, WorkerCrash

MAX_RUNNING = 256  # jobs at a time, computing or not
MAX_IDLE = 16  # workers for tools without a state
MAX_CALLS_PER_WORKER = 10_000  # then it is replaced, so that its memory is freed
MAX_WALL = 4.0  # times the timeout, with all waits for a processor
LOOK_SECONDS = 0.004  # at least between looks at which workers compute, and until a job's worker is awake
LOOK_SHARE = 0.2  # at most of the time is spent on these looks


@dataclass(frozen=True, slots=True)
class Command:
    session: EpisodeSession
    kind: str  # "start", "step", "finish" or "cancel"
    turn: PolicyTurn | None = None


class Scheduler:
    """Runs in `run`, in a thread; `send` and `stop` may be called from others."""

    def __init__(
        self, workers: int, timeout: float, episode_timeout: float | None,
        deliver: Callable[[EpisodeSession, Answer], None], *, overlap: bool = True,
    ) -> None:  # fmt: skip
        """`timeout` is in seconds per job; `deliver` takes an episode's answers, in the thread.

        Without `overlap` workers that wait count, too.
        """
        self._workers, self._timeout, self._deliver, self._overlap = workers, timeout, deliver, overlap
        self._episode_timeout = episode_timeout
        self._commands: deque[Command] = deque()
        self._ready: deque[CallJob] = deque()
        self._running: dict[Worker, CallJob] = {}
        self._idle: dict[ForkServer, list[Worker]] = {}  # for tools without a state
        self._sessions: dict[int, EpisodeSession] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._next_look = 0.0
        self._stopped = threading.Event()

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._interrupt()

    def stop(self) -> None:
        self._stopped.set()
        self._interrupt()

    def run(self) -> None:
        """Run until `stop`. Raises WorkerClosed if the fork server was closed before."""
        try:
            while not self._stopped.is_set():
                while self._commands:
                    self._obey(self._commands.popleft())
                self._hand_out()
                for key, _ in self._selector.select(self._seconds_to_next_check()):
                    if key.data is not None:
                        self._receive(key.data)
                with suppress(BlockingIOError):
                    self._woken.recv(1 << 12)
                self._check_times()
        finally:
            self._selector.close()
            self._wake.close()
            self._woken.close()

    def _interrupt(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: it wakes anyhow; closed: nobody is there
            self._wake.send(b"w")

    # --- commands -----------------------------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        session = command.session
        if command.kind == "start":
            self._sessions[session.serial] = session
            self._take(session, session.begin())
        elif session.ended:
            return
        elif command.kind == "step":
            assert command.turn is not None
            self._take(session, session.take_turn(command.turn))
        elif command.kind == "finish" and session.loaded.scores:
            self._take(session, session.finish())
        else:
            self._end(session)

    def _take(self, session: EpisodeSession, found: list[CallJob] | Answer) -> None:
        if not isinstance(found, list):
            self._answer(session, found)
        elif session.stateful:
            session.queue.extend(found)
            self._ready.append(session.queue.popleft())
        else:
            self._ready.extend(found)

    def _answer(self, session: EpisodeSession, answer: Answer | None) -> None:
        """Deliver an episode's answer, if it is complete; else go on with its next job."""
        if answer is None:
            if session.stateful and session.queue and not session.running:
                self._ready.append(session.queue.popleft())
            return
        self._deliver(session, answer)
        if not isinstance(answer, StepResult):
            self._end(session)

    def _end(self, session: EpisodeSession) -> None:
        """Close an episode; its environment's `close` is called if that is possible at once."""
        if session.ended:
            return
        session.ended = True
        self._sessions.pop(session.serial, None)
        session.queue.clear()
        for job in list(session.running):
            self._lose(job)
        session.history.clear()
        if session.worker is not None and session.loaded.closes:
            self._ready.append(CallJob(session, {"op": "close", "max_images": 0}))
        elif session.worker is not None:
            session.kind.server.reap(session.worker)
            session.worker = None

    # --- workers ------------------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        room = self._room() if self._ready else 0
        while self._ready and room:
            job = self._ready.popleft()
            session = job.session
            if session.ended and job.request["op"] != "close":
                continue
            if session.stateful and session.worker is None and session.history:
                job = self._play_again(session, job)
            try:
                self._send(job)
                room -= 1
            except (WorkerCrash, RewardSpecError, OSError) as error:
                if session.ended:
                    continue
                failure = Failure("crash", f"no worker can be started: {error}")
                self._answer(session, session.lose_job(job, failure, time.monotonic()))

    def _play_again(self, session: EpisodeSession, job: CallJob) -> CallJob:
        """Queue the answered jobs of a deterministic environment before `job`, for a new worker."""
        again = [CallJob(session, old.request, old.index, expected=old.expected) for old in session.history]
        session.queue.extendleft([job, *again[:0:-1]])
        return again[0]

    def _send(self, job: CallJob) -> None:
        """Raises WorkerClosed, WorkerCrash, RewardSpecError or OSError if no worker takes it."""
        session = job.session
        server = session.kind.server
        idle = self._idle.setdefault(server, [])
        while True:
            fresh = not idle
            if session.stateful:
                fresh = session.worker is None
                session.worker = worker = session.worker or server.start()
            else:
                worker = idle.pop() if idle else server.start()
            job.worker, job.began, job.waited = worker, time.monotonic(), seconds_waited(worker.pid)
            try:
                worker.send(job.request, min(SEND_TIMEOUT, self._timeout))
                break
            except OSError:
                server.reap(worker)
                if session.stateful:
                    session.worker = None
                    if not fresh and session.history:
                        job = self._play_again(session, job)
                        continue
                if fresh or session.stateful:
                    raise
        self._running[worker] = job
        session.running.add(job)
        self._selector.register(worker.connection, selectors.EVENT_READ, job)

    def _release(self, job: CallJob) -> None:
        worker = job.worker
        assert worker is not None
        self._selector.unregister(worker.connection)
        del self._running[worker]
        job.session.running.discard(job)

    def _lose(self, job: CallJob) -> WorkerCrash:
        """Kill a job's worker and all that it started."""
        self._release(job)
        assert job.worker is not None
        if job.session.stateful:
            job.session.worker = None
        return job.session.kind.server.reap(job.worker)

    def _room(self) -> int:
        """Return how many jobs may be sent now."""
        if len(self._running) < self._workers:
            return self._workers - len(self._running)
        now = time.monotonic()
        if not self._overlap or len(self._running) >= MAX_RUNNING or now < self._next_look:
            return 0
        busy = 0
        for worker, job in self._running.items():
            busy += now - job.began < LOOK_SECONDS or computes(worker.pid)
            if busy >= self._workers:
                break
        self._next_look = now + max(LOOK_SECONDS, (time.monotonic() - now) / LOOK_SHARE)
        return self._workers - busy

    # --- replies ------------------------------------------------------------------------------------------------------

    def _receive(self, job: CallJob) -> None:
        worker, session = job.worker, job.session
        assert worker is not None
        try:
            messages = worker.inbox.read()
        except (EOFError, OSError, ValueError, RecursionError):
            self._on_death(job)
            return
        if not messages:
            return
        if session.ended:  # its `close` has returned
            self._lose(job)
            return
        answer: Answer | None
        try:
            if len(messages) > 1:
                raise ValueError("more than one reply")
            answer = self._read_reply(job, messages[0])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._lose(job)
            self._answer(session, Failure("wrong_shape", "the worker's message is garbled"))
            return
        self._release(job)
        worker.scored += 1
        if not session.stateful:
            idle = self._idle[session.kind.server]
            if len(idle) < max(MAX_IDLE, self._workers) and worker.scored < MAX_CALLS_PER_WORKER:
                idle.append(worker)
            else:
                session.kind.server.reap(worker)
        self._answer(session, answer)

    def _read_reply(self, job: CallJob, reply: object) -> Answer | None:
        if job.expected is None:
            return job.session.take_reply(job, reply, time.monotonic())
        if digest(reply) != job.expected:
            return Failure("exception", "deterministic = True, but played again it answered differently")
        return None

    def _on_death(self, job: CallJob) -> None:
        """Try a job once more after its worker died, if that can be: it may have been the fault of another."""
        session = job.session
        end = self._lose(job)
        if session.ended:
            return
        again = session.loaded.deterministic and session.history if session.stateful else end.from_outside
        if again and not job.tries and job.expected is None:
            job.tries += 1
            self._ready.append(job)
            return
        failure = Failure(end.cause, f"the worker process {end}")
        if job.expected is not None:
            self._answer(session, Failure(end.cause, f"{failure.message} when the episode was played again"))
            return
        self._answer(session, session.lose_job(job, failure, time.monotonic()))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _check_times(self) -> None:
        now = time.monotonic()
        for worker, job in list(self._running.items()):
            if worker in self._running and now - job.began >= self._timeout and self._timed_out(job, now):
                self._on_timeout(job)
        if self._episode_timeout is not None:
            for session in list(self._sessions.values()):
                if now - session.began >= self._episode_timeout:
                    message = f"the episode took longer than {self._episode_timeout:g} s"
                    self._answer(session, Failure("timeout", message))

    def _timed_out(self, job: CallJob, now: float) -> bool:
        assert job.worker is not None
        if now - job.began >= MAX_WALL * self._timeout:
            return True
        return now - job.began - (seconds_waited(job.worker.pid) - job.waited) >= self._timeout

    def _on_timeout(self, job: CallJob) -> None:
        session = job.session
        self._lose(job)
        if session.ended:
            return
        failure = Failure("timeout", f"no result after {self._timeout:g} s")
        if job.expected is not None:
            self._answer(session, failure)
        else:
            self._answer(session, session.lose_job(job, failure, time.monotonic()))

    def _seconds_to_next_check(self) -> float | None:
        now, due = time.monotonic(), list[float]()
        due += [job.began + self._timeout for job in self._running.values()]
        if self._episode_timeout is not None:
            due += [session.began + self._episode_timeout for session in self._sessions.values()]
        if self._ready:
            due.append(max(self._next_look, now))
        if not due:
            return None
        return max(0.0, min(moment - now if moment > now else LOOK_SECONDS for moment in due))
