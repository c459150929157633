"""One batch on its way through the workers, sample by sample, beside samples that hang.

    waiting ──> running ── slow, as 5 usual ones ──> watched ── as long again ──> hanging ── its time is over ──> failed
                   └─────────────────────────────────┴─────── an outcome ─────────────┘

A hanging sample keeps its worker, which from then on gets idle processor time only; its outcome still counts. Another
worker takes over the samples behind it. So the deadlines of hanging samples pass side by side, and beside other work.
What a machine that stands still, or is busy elsewhere, keeps from all of them is taken from no sample's time.

Few may hang while hardly anything has been scored. Where nothing but timeouts comes, the batch is suspect: every sample
is then tried, many side by side, before the function is taken for one that never returns and the rest fails untried.
"""

import contextlib
import os
import random
import selectors
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r1_rewards.errors import RewardSpecError
from r1_rewards.types import Failure, Outcome
from r1_rewards.workers.frames import unpack
from r1_rewards.workers.process import ForkServer, Worker, WorkerCrash

SUSPECT_AFTER = 3  # timeouts in a row, and at least as many as there are workers
MAX_HANGING = 128  # samples at a time
MAX_HANGING_SUSPECTS = 32  # while the batch is suspect; as many timeouts more, and the rest fails untried
SECOND_TRIES_IN_VAIN = 4  # of samples whose worker was killed from outside, after which there are none in this batch
RETIREMENT = 10_000  # samples, after which a worker's memory is given back
_JOB_SECONDS = 0.05  # of work to hand out at a time
_JOB_SAMPLES = 64
_SLOW_FACTOR = 5.0  # times the usual duration is slow
_SLOW_SECONDS = 0.03  # and this at least
_POLL_SECONDS = 0.03  # between checks of what waits for something that sends no signal


class Durations:
    """How long a sample usually takes, and the first of a new worker, which may have to import; kept over batches."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds a sample may take
        self.usual: float | None = None
        self.first: float | None = None

    def record(self, seconds: float, samples: int) -> None:
        """Take in samples of `seconds` each; a single slow one hardly counts."""
        for _ in range(samples):
            self.usual = seconds if self.usual is None else 0.98 * self.usual + 0.02 * min(seconds, 3 * self.usual)

    def record_first(self, seconds: float) -> None:
        """Take in what a new worker took for its first sample."""
        self.first = seconds if self.first is None else max(self.first, seconds)

    def slow_after(self, *, first: bool) -> float:
        """Return the seconds after which a sample counts as slow."""
        usual = self.first if first else self.usual
        if usual is None:
            return self.timeout / 4
        return max(_SLOW_SECONDS, _SLOW_FACTOR * usual)

    def job_size(self, waiting: int, workers: int) -> int:
        """Return how many samples to give a worker at a time: one while nothing is known, and of slow ones."""
        if self.usual is None:
            return 1
        return max(1, min(_JOB_SAMPLES, int(_JOB_SECONDS / max(self.usual, 1e-6)), waiting // (2 * workers)))


class _Job:
    """A worker and the samples it was given, in order; it is at the first of them."""

    def __init__(self, worker: Worker, indices: deque[int], now: float) -> None:
        self.worker = worker
        self.indices = indices
        self.began = now  # with the first sample
        self.hangs = False
        self.watched_from: float | None = None  # since it was found slow
        self._used_before = 0.0  # seconds, until it was found slow
        self._waited_before = _seconds_waited(worker.pid)

    def watch(self, now: float) -> None:
        """Find the sample slow."""
        self.watched_from, self._used_before = now, self.seconds_used(now)

    def seconds_watched(self, now: float) -> float:
        """Return the seconds that the sample could use since it was found slow."""
        return self.seconds_used(now) - self._used_before

    def seconds_used(self, now: float) -> float:
        """Return the seconds that the sample could use: what the worker waited for a processor is not counted."""
        return now - self.began - (_seconds_waited(self.worker.pid) - self._waited_before)

    def next_sample(self, now: float) -> None:
        """Begin with the sample that is first now."""
        self.began, self.watched_from = now, None


class Batch:
    """Scores samples one by one on up to `workers` workers, and on more where samples hang."""

    def __init__(
        self,
        server: ForkServer,
        idle: list[Worker],
        samples: Mapping[int, Mapping[str, Any]],
        durations: Durations,
        workers: int,
    ) -> None:
        """`samples` by index; `idle` are workers to begin with, and receives those that are left at the end."""
        self._server = server
        self._idle = idle
        self._samples = samples
        self._durations = durations
        self._workers = workers
        # Shuffled, so that one prompt whose responses all hang does not look like a function that always hangs.
        indices = list(samples)
        random.Random(0).shuffle(indices)
        self._waiting = deque(indices)
        # Samples whose worker was killed from outside, to be tried once more, alone, and how they failed.
        self._killed: deque[tuple[int, Failure]] = deque()
        self._tried_twice: set[int] = set()
        self._in_vain = 0
        self._jobs: list[_Job] = []
        self._selector = selectors.DefaultSelector()
        self._timeouts_in_a_row = 0
        self._scored = 0
        self._stalled = 0.0  # seconds that this process was kept from looking, and its workers perhaps from working
        self._only_hanging_from: float | None = None  # since when nothing else is left

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Yield each sample's index and outcome as they come. Raises WorkerClosed if the pool is closed."""
        try:
            while self._waiting or self._jobs or self._killed:
                if not self._waiting and not self._jobs:
                    if self._in_vain >= SECOND_TRIES_IN_VAIN:
                        yield from self._killed
                        return
                    self._waiting.append(self._killed.popleft()[0])
                yield from self._hand_out()
                if not self._jobs:
                    continue
                for key, _ in self._await(self._seconds_to_next_check()):
                    yield from self._receive(key.data)
                yield from self._check_times()
        finally:
            for job in self._jobs:
                self._server.reap(job.worker)
            self._selector.close()

    def _await(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for workers to answer, and notice if that took longer than it was to."""
        start = time.monotonic()
        ready = self._selector.select(seconds)
        self._stalled += max(0.0, time.monotonic() - start - seconds)
        return ready

    def _now(self) -> float:
        """Return the seconds on a clock that stands still while the machine keeps this process waiting."""
        return time.monotonic() - self._stalled

    @property
    def _suspect(self) -> bool:
        """Whether nothing but timeouts comes, as of a function that never returns."""
        return self._timeouts_in_a_row >= self._suspect_after

    @property
    def _suspect_after(self) -> int:
        return max(SUSPECT_AFTER, self._workers)

    def _hand_out(self) -> Iterator[tuple[int, Outcome]]:
        """Give samples to workers until enough of them are busy with samples that do not hang."""
        while self._waiting and sum(not job.hangs for job in self._jobs) < self._workers:
            try:
                worker = self._idle.pop() if self._idle else self._server.start()
            except (RewardSpecError, WorkerCrash) as error:  # the file loaded once, and no longer does
                yield from self._fail_waiting(Failure("crash", f"the reward cannot be loaded again: {error}"))
                return
            size = 1 if self._suspect else self._durations.job_size(len(self._waiting), self._workers)
            job = _Job(worker, deque(self._waiting.popleft() for _ in range(size)), self._now())
            self._jobs.append(job)
            self._selector.register(worker.connection, selectors.EVENT_READ, job)
            message = {
                "samples": [self._samples[index] for index in job.indices],
                "whole": False,
                "cpu_seconds": self._durations.timeout * (os.cpu_count() or 1),
            }
            try:
                worker.send(message)
            except OSError:
                yield from self._lose(job)

    def _receive(self, job: _Job) -> Iterator[tuple[int, Outcome]]:
        """Take what a worker has sent."""
        try:
            outcomes = [unpack(message) for message in job.worker.inbox.read()]
        except (EOFError, OSError, ValueError):
            yield from self._lose(job)
            return
        if outcomes and not job.hangs:
            now = self._now()
            if job.worker.scored:
                self._durations.record((now - job.began) / len(outcomes), len(outcomes))
            else:
                self._durations.record_first(now - job.began)
            job.next_sample(now)
        # The worker of a hanging sample may have gone on to samples that others have by now.
        for outcome in outcomes[: len(job.indices)]:
            self._scored += 1
            self._timeouts_in_a_row = 0
            job.worker.scored += 1
            yield job.indices.popleft(), outcome
        if not job.indices:
            self._release(job)

    def _release(self, job: _Job) -> None:
        """Keep a worker that has done its samples for others, unless it was slowed down or has done many."""
        self._forget(job)
        if job.hangs or job.worker.scored >= RETIREMENT:
            self._server.reap(job.worker)
        else:
            self._idle.append(job.worker)

    def _lose(self, job: _Job) -> Iterator[tuple[int, Outcome]]:
        """Let the first sample of a worker that has died fail, and the others wait again.

        If the worker was killed from outside, perhaps for another's use of memory, the sample is tried once more, alone
        at the end of the batch.
        """
        end = self._end(job)
        self._timeouts_in_a_row = 0
        index = job.indices.popleft()
        self._waiting.extendleft(reversed(job.indices))
        self._in_vain += index in self._tried_twice
        failure = Failure(end.cause, f"the worker {end}")
        if end.from_outside and index not in self._tried_twice:
            self._tried_twice.add(index)
            self._killed.append((index, failure))
        else:
            yield index, failure

    def _check_times(self) -> Iterator[tuple[int, Outcome]]:
        """Find the samples that are slow, that hang, and whose time is over."""
        now = self._now()
        if self._waiting or not all(job.hangs for job in self._jobs):
            self._only_hanging_from = None
        elif self._only_hanging_from is None:
            self._only_hanging_from = now
        for job in list(self._jobs):
            if self._is_over(job, now):
                self._end(job)
                self._timeouts_in_a_row += 1
                yield job.indices.popleft(), Failure("timeout", f"no score after {self._durations.timeout:g} s")
                self._waiting.extendleft(reversed(job.indices))
            elif not job.hangs and now - job.began >= self._slow_after(job):
                self._look_at(job, now)
        if self._timeouts_in_a_row >= self._suspect_after + MAX_HANGING_SUSPECTS:
            tried = f"the {self._timeouts_in_a_row} samples before it"
            message = f"not tried: {tried} each took longer than {self._durations.timeout:g} s"
            yield from self._fail_waiting(Failure("timeout", message))

    def _look_at(self, job: _Job, now: float) -> None:
        """Watch a slow sample; let one hang that has been watched for as long again, if another one may."""
        if job.watched_from is None:
            job.watch(now)
            return
        if job.seconds_watched(now) < self._slow_after(job) or not self._another_may_hang():
            return
        job.hangs = True
        self._waiting.extendleft(list(job.indices)[:0:-1])
        job.indices = deque([job.indices[0]])
        with contextlib.suppress(AttributeError, OSError):  # where the system cannot, it shares the processors
            os.sched_setscheduler(job.worker.pid, os.SCHED_IDLE, os.sched_param(0))

    def _slow_after(self, job: _Job) -> float:
        seconds = self._durations.slow_after(first=not job.worker.scored)
        if not self._suspect:
            return seconds
        # Twice this until a sample hangs: all suspects that may hang begin within one timeout.
        return min(seconds, self._durations.timeout / (2 * MAX_HANGING_SUSPECTS))

    def _another_may_hang(self) -> bool:
        hanging = sum(job.hangs for job in self._jobs)
        if self._suspect:
            return hanging < MAX_HANGING_SUSPECTS
        return hanging < min(MAX_HANGING, max(SUSPECT_AFTER - 1, self._workers - 1, self._scored // 10))

    def _is_over(self, job: _Job, now: float) -> bool:
        """Whether a sample has had its time: what it could use, not what it waited for a processor, behind other work.

        But no sample outlives the rest of the batch by more than its time, nor when too many hang.
        """
        timeout = self._durations.timeout
        if now - job.began < timeout:
            return False
        if job.seconds_used(now) >= timeout:
            return True
        if self._only_hanging_from is not None:
            return now - max(self._only_hanging_from, job.began) >= timeout
        return sum(other.hangs for other in self._jobs) >= MAX_HANGING

    def _seconds_to_next_check(self) -> float:
        """Return how many seconds may pass until `_check_times` has something to do."""
        now, due = self._now(), []
        for job in self._jobs:
            due.append(job.began + self._durations.timeout)
            if not job.hangs:
                due.append((job.watched_from or job.began) + self._slow_after(job))
        # What is due already waits for something else: a processor, leave to hang, or the end of other work.
        return max(0.0, min(moment - now if moment > now else _POLL_SECONDS for moment in due))

    def _end(self, job: _Job) -> WorkerCrash:
        self._forget(job)
        return self._server.reap(job.worker)

    def _forget(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._selector.unregister(job.worker.connection)

    def _fail_waiting(self, failure: Failure) -> Iterator[tuple[int, Outcome]]:
        while self._waiting:
            yield self._waiting.popleft(), failure


def score_whole(
    worker: Worker, samples: Sequence[Mapping[str, Any]], seconds: float, cpu_seconds: float
) -> list[Outcome] | Failure:
    """Score samples in one call. Raises TimeoutError, EOFError, OSError or ValueError if the worker is lost."""
    worker.send({"samples": list(samples), "whole": True, "cpu_seconds": cpu_seconds})
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(worker.connection, selectors.EVENT_READ)
        while True:
            remaining = deadline - time.monotonic()
            came = selector.select(max(0.0, remaining))  # even when it is over: this process may have been kept waiting
            if not came and remaining <= 0:
                raise TimeoutError
            if came:
                for message in worker.inbox.read():
                    if isinstance(message, list):
                        return [unpack(one) for one in message]
                    failure = unpack(message)
                    assert isinstance(failure, Failure)
                    return failure


def _seconds_waited(pid: int) -> float:
    """Return the seconds that a process was ready to run and had no processor; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
