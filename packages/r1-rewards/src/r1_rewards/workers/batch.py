"""Schedule the samples of one batch on worker processes, so that slow samples do not delay the others.

    waiting ──> running ── 5 times the usual duration ──> watched ── as long again ──> set aside ── timeout ──> failed
                   └──────────────────────────────────────────┴───── an outcome ───────────┘

A sample that is set aside keeps its worker at idle priority, and its outcome still counts. Another worker takes over
the samples queued behind it, so the timeouts of slow samples overlap. Time spent waiting for a processor is not
counted. Few samples are set aside until some have been scored. If a batch yields only timeouts, many samples are tried
at once; if they time out, too, the rest fails untried.
"""

import contextlib
import os
import random
import selectors
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from r1_rewards.types import Failure, Outcome, RewardSpecError
from r1_rewards.workers.frames import Job, WireSample, unpack
from r1_rewards.workers.process import ForkServer, Worker, WorkerCrash

MIN_TIMEOUTS_IN_A_ROW = 3  # for a batch to count as stuck, and at least as many as there are workers
MAX_SLOW = 128  # samples set aside at a time
MAX_SLOW_AFTER_TIMEOUTS = 32  # while the batch is stuck; after as many more timeouts the rest fails untried
MAX_FAILED_RETRIES = 4  # of samples whose worker was killed from outside; after them the batch has no more retries
MAX_SAMPLES_PER_WORKER = 10_000  # then it is replaced, so that its memory is freed
_JOB_SECONDS = 0.05  # of work to hand out at a time
_JOB_SAMPLES = 64
_SLOW_FACTOR = 5.0  # times the usual duration is slow
_SLOW_SECONDS = 0.03  # and this at least
_POLL_SECONDS = 0.03  # between checks of what waits for something that sends no signal


class Durations:
    """The usual duration of a sample, and of a new worker's first one, which may include imports. Kept over batches."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds a sample may take
        self.usual: float | None = None
        self.first: float | None = None

    def record(self, seconds: float, samples: int) -> None:
        """Add `samples` of `seconds` each to the moving average; one slow sample hardly changes it."""
        for _ in range(samples):
            self.usual = seconds if self.usual is None else 0.98 * self.usual + 0.02 * min(seconds, 3 * self.usual)

    def record_first(self, seconds: float) -> None:
        self.first = seconds if self.first is None else max(self.first, seconds)

    def slow_after(self, *, first: bool) -> float:
        usual = self.first if first else self.usual
        if usual is None:
            return self.timeout / 4
        return max(_SLOW_SECONDS, _SLOW_FACTOR * usual)

    def job_size(self, waiting: int, workers: int) -> int:
        if self.usual is None:
            return 1
        return max(1, min(_JOB_SAMPLES, int(_JOB_SECONDS / max(self.usual, 1e-6)), waiting // (2 * workers)))


class _Job:
    """The samples sent to a worker, in order; the first one is running."""

    def __init__(self, worker: Worker, indices: deque[int], now: float) -> None:
        self.worker = worker
        self.indices = indices
        self.began = now  # with the first sample
        self.set_aside = False
        self.watched_from: float | None = None  # since it was found slow
        self._used_before = 0.0  # seconds, until it was found slow
        self._waited_before = seconds_waited(worker.pid)

    def watch(self, now: float) -> None:
        self.watched_from, self._used_before = now, self.seconds_used(now)

    def seconds_watched(self, now: float) -> float:
        return self.seconds_used(now) - self._used_before

    def seconds_used(self, now: float) -> float:
        return now - self.began - (seconds_waited(self.worker.pid) - self._waited_before)

    def next_sample(self, now: float) -> None:
        self.began, self.watched_from = now, None


class Batch:
    """Scores samples on `workers` workers, and on more while samples are set aside."""

    def __init__(
        self,
        server: ForkServer,
        idle: list[Worker],
        samples: Mapping[int, WireSample],
        durations: Durations,
        workers: int,
    ) -> None:
        self._server = server
        self._idle = idle
        self._samples = samples
        self._durations = durations
        self._workers = workers
        # Shuffled, so that one prompt whose responses all hang does not look like a function that never returns.
        indices = list(samples)
        random.Random(0).shuffle(indices)
        self._waiting = deque(indices)
        # Samples whose worker was killed from outside, to be tried once more, alone, and how they failed.
        self._killed: deque[tuple[int, Failure]] = deque()
        self._retried: set[int] = set()
        self._failed_retries = 0
        self._jobs: list[_Job] = []
        self._selector = selectors.DefaultSelector()
        self._timeouts_in_a_row = 0
        self._scored = 0
        self._stalled = 0.0  # seconds that this process was kept from looking, and its workers perhaps from working
        self._only_slow_since: float | None = None  # since when nothing else is left

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Yield (index, outcome) in the order of completion. Raises WorkerClosed if the pool is closed."""
        try:
            while self._waiting or self._jobs or self._killed:
                if not self._waiting and not self._jobs:
                    if self._failed_retries >= MAX_FAILED_RETRIES:
                        yield from self._killed
                        return
                    self._waiting.append(self._killed.popleft()[0])
                yield from self._hand_out()
                if not self._jobs:
                    continue
                for key, _ in self._select(self._seconds_to_next_check()):
                    yield from self._receive(key.data)
                yield from self._check_times()
        finally:
            for job in self._jobs:
                self._server.reap(job.worker)
            self._selector.close()

    def _select(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        start = time.monotonic()
        ready = self._selector.select(seconds)
        self._stalled += max(0.0, time.monotonic() - start - seconds)
        return ready

    def _now(self) -> float:
        return time.monotonic() - self._stalled

    @property
    def _only_timeouts(self) -> bool:
        return self._timeouts_in_a_row >= self._max_timeouts_in_a_row

    @property
    def _max_timeouts_in_a_row(self) -> int:
        return max(MIN_TIMEOUTS_IN_A_ROW, self._workers)

    def _hand_out(self) -> Iterator[tuple[int, Outcome]]:
        while self._waiting and sum(not job.set_aside for job in self._jobs) < self._workers:
            try:
                worker = self._idle.pop() if self._idle else self._server.start()
            except (RewardSpecError, WorkerCrash) as error:  # the file loaded once, and no longer does
                yield from self._fail_waiting(Failure("crash", f"the reward cannot be loaded again: {error}"))
                return
            size = 1 if self._only_timeouts else self._durations.job_size(len(self._waiting), self._workers)
            job = _Job(worker, deque(self._waiting.popleft() for _ in range(size)), self._now())
            self._jobs.append(job)
            self._selector.register(worker.connection, selectors.EVENT_READ, job)
            message: Job = {
                "samples": [self._samples[index] for index in job.indices],
                "whole": False,
                "cpu_seconds": self._durations.timeout * (os.cpu_count() or 1),
            }
            try:
                worker.send(message)
            except OSError:
                yield from self._on_worker_death(job)

    def _receive(self, job: _Job) -> Iterator[tuple[int, Outcome]]:
        try:
            outcomes = [unpack(message) for message in job.worker.inbox.read()]
        except (EOFError, OSError, ValueError):
            yield from self._on_worker_death(job)
            return
        if outcomes and not job.set_aside:
            now = self._now()
            if job.worker.scored:
                self._durations.record((now - job.began) / len(outcomes), len(outcomes))
            else:
                self._durations.record_first(now - job.began)
            job.next_sample(now)
        # The worker of a sample that was set aside may have gone on to samples that others have scored since.
        for outcome in outcomes[: len(job.indices)]:
            self._scored += 1
            self._timeouts_in_a_row = 0
            job.worker.scored += 1
            yield job.indices.popleft(), outcome
        if not job.indices:
            self._release(job)

    def _release(self, job: _Job) -> None:
        self._remove(job)
        if job.set_aside or job.worker.scored >= MAX_SAMPLES_PER_WORKER:
            self._server.reap(job.worker)
        else:
            self._idle.append(job.worker)

    def _on_worker_death(self, job: _Job) -> Iterator[tuple[int, Outcome]]:
        end = self._reap(job)
        self._timeouts_in_a_row = 0
        index = job.indices.popleft()
        self._waiting.extendleft(reversed(job.indices))
        self._failed_retries += index in self._retried
        failure = Failure(end.cause, f"the worker {end}")
        if end.from_outside and index not in self._retried:
            self._retried.add(index)
            self._killed.append((index, failure))
        else:
            yield index, failure

    def _check_times(self) -> Iterator[tuple[int, Outcome]]:
        now = self._now()
        if self._waiting or not all(job.set_aside for job in self._jobs):
            self._only_slow_since = None
        elif self._only_slow_since is None:
            self._only_slow_since = now
        for job in list(self._jobs):
            if self._timed_out(job, now):
                self._reap(job)
                self._timeouts_in_a_row += 1
                yield job.indices.popleft(), Failure("timeout", f"no score after {self._durations.timeout:g} s")
                self._waiting.extendleft(reversed(job.indices))
            elif not job.set_aside and now - job.began >= self._slow_after(job):
                self._check_slow(job, now)
        if self._timeouts_in_a_row >= self._max_timeouts_in_a_row + MAX_SLOW_AFTER_TIMEOUTS:
            tried = f"the {self._timeouts_in_a_row} samples before it"
            message = f"not tried: {tried} each took longer than {self._durations.timeout:g} s"
            yield from self._fail_waiting(Failure("timeout", message))

    def _check_slow(self, job: _Job, now: float) -> None:
        if job.watched_from is None:
            job.watch(now)
            return
        if job.seconds_watched(now) < self._slow_after(job) or not self._may_set_aside():
            return
        job.set_aside = True
        self._waiting.extendleft(list(job.indices)[:0:-1])
        job.indices = deque([job.indices[0]])
        with contextlib.suppress(AttributeError, OSError):  # where the system cannot, it shares the processors
            os.sched_setscheduler(job.worker.pid, os.SCHED_IDLE, os.sched_param(0))

    def _slow_after(self, job: _Job) -> float:
        seconds = self._durations.slow_after(first=not job.worker.scored)
        if not self._only_timeouts:
            return seconds
        # A sample is set aside after twice this, so that MAX_SLOW_AFTER_TIMEOUTS of them begin within one timeout.
        return min(seconds, self._durations.timeout / (2 * MAX_SLOW_AFTER_TIMEOUTS))

    def _may_set_aside(self) -> bool:
        slow = sum(job.set_aside for job in self._jobs)
        if self._only_timeouts:
            return slow < MAX_SLOW_AFTER_TIMEOUTS
        return slow < min(MAX_SLOW, max(MIN_TIMEOUTS_IN_A_ROW - 1, self._workers - 1, self._scored // 10))

    def _timed_out(self, job: _Job, now: float) -> bool:
        """Whether a sample has used up its timeout, without its worker's wait for a processor.

        The wait counts once the rest of the batch has been finished for a timeout, or if MAX_SLOW samples are set
        aside.
        """
        timeout = self._durations.timeout
        if now - job.began < timeout:
            return False
        if job.seconds_used(now) >= timeout:
            return True
        if self._only_slow_since is not None:
            return now - max(self._only_slow_since, job.began) >= timeout
        return sum(other.set_aside for other in self._jobs) >= MAX_SLOW

    def _seconds_to_next_check(self) -> float:
        now, due = self._now(), []
        for job in self._jobs:
            due.append(job.began + self._durations.timeout)
            if not job.set_aside:
                due.append((job.watched_from or job.began) + self._slow_after(job))
        # What is due already waits for something else: a processor, leave to hang, or the end of other work.
        return max(0.0, min(moment - now if moment > now else _POLL_SECONDS for moment in due))

    def _reap(self, job: _Job) -> WorkerCrash:
        self._remove(job)
        return self._server.reap(job.worker)

    def _remove(self, job: _Job) -> None:
        self._jobs.remove(job)
        self._selector.unregister(job.worker.connection)

    def _fail_waiting(self, failure: Failure) -> Iterator[tuple[int, Outcome]]:
        while self._waiting:
            yield self._waiting.popleft(), failure


def score_whole(
    worker: Worker, samples: Sequence[WireSample], seconds: float, cpu_seconds: float
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
                        return list(map(unpack, message))
                    failure = unpack(message)
                    assert isinstance(failure, Failure)
                    return failure


def seconds_waited(pid: int) -> float:
    """Return how long a process waited for a processor; 0 where the system does not report it."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
