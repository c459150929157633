"""One batch on its way through the workers: who scores what, who hangs, and when it is over for those.

A sample that takes much longer than others is left to its worker, which from then on gets only idle processor time, and
another worker takes its place at once. So deadlines of hanging samples pass side by side, and beside honest work, and
not one after the other.
"""

import contextlib
import os
import random
import selectors
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from r1_rewards.spec import RewardSpecError
from r1_rewards.workers.frames import Outcome
from r1_rewards.workers.process import Nursery, Worker, WorkerCrash

TIMEOUTS_IN_A_ROW = 3
MAX_HANGING = 128
RETIREMENT = 10_000  # samples, after which a worker's memory is given back
_JOB_SECONDS = 0.05  # of work to hand out at a time
_JOB_SAMPLES = 64
_SLOW = 5.0  # times the usual duration: a sample is slow, and hangs after as much again
_SLOW_SECONDS = 0.03  # at least
_LOOK_AGAIN = 0.03  # seconds


class Pace:
    """How long a sample usually takes, and the first of a new worker, which may have to import; kept over batches."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout  # seconds a sample may take
        self.usual: float | None = None
        self.first: float | None = None

    def note(self, seconds: float, samples: int) -> None:
        """Take note of samples that took `seconds` each; a single slow one hardly counts."""
        for _ in range(samples):
            self.usual = seconds if self.usual is None else 0.98 * self.usual + 0.02 * min(seconds, 3 * self.usual)

    def note_first(self, seconds: float) -> None:
        """Take note of what a new worker took to its first answer."""
        self.first = seconds if self.first is None else max(self.first, seconds)

    def slow(self, *, first: bool) -> float:
        """Seconds after which a sample counts as slow, and then, on a processor, as hanging; it still may answer."""
        usual = self.first if first else self.usual
        if usual is None:
            return self.timeout / 4
        return max(_SLOW_SECONDS, _SLOW * usual)

    def job_size(self, waiting: int, workers: int) -> int:
        """How many samples to give a worker at a time: one while nothing is known, and of slow ones."""
        if self.usual is None:
            return 1
        return max(1, min(_JOB_SAMPLES, int(_JOB_SECONDS / max(self.usual, 1e-6)), waiting // (2 * workers)))


class _Task:
    """A worker and the samples it was given, the first of which it is at."""

    def __init__(self, worker: Worker, indices: deque[int], now: float) -> None:
        self.worker = worker
        self.indices = indices
        self.since = now  # when it began the first
        self.hangs = False
        self.looked: float | None = None  # when it was first found slow
        self.waited_before = 0.0  # for a processor, until then

    def had(self, now: float) -> float:
        """Return the seconds that the sample could use: since it was found slow, waits for a processor do not count."""
        if self.looked is None:
            return now - self.since
        return now - self.since - (_waited(self.worker.pid) - self.waited_before)

    def look(self, now: float) -> None:
        """Begin to watch a sample that is slow."""
        self.looked = now
        self.waited_before = _waited(self.worker.pid)


class Batch:
    """Scores samples one by one on up to `workers` workers, and on more where samples hang."""

    def __init__(
        self, nursery: Nursery, idle: list[Worker], samples: Mapping[int, Mapping[str, Any]], pace: Pace, workers: int
    ) -> None:
        """`samples` by index; `idle` are workers to begin with, and receives those that are left at the end."""
        self._nursery = nursery
        self._idle = idle
        self._samples = samples
        self._pace = pace
        self._workers = workers
        # Shuffled, so that one prompt whose answers all hang does not look like a function that always hangs.
        indices = list(samples)
        random.Random(0).shuffle(indices)
        self._waiting = deque(indices)
        self._tasks: list[_Task] = []
        self._selector = selectors.DefaultSelector()
        self._timeouts_in_a_row = 0
        self._scored = 0
        self._honest_end: float | None = None  # when only hanging samples were left

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        """Yield each sample's index and outcome as they come. Raises WorkerClosed if the pool is closed."""
        try:
            while self._waiting or self._tasks:
                yield from self._hand_out()
                for key, _ in self._selector.select(self._patience()):
                    yield from self._collect(key.data)
                yield from self._watch()
        finally:
            for task in self._tasks:
                self._nursery.bury(task.worker)
            self._selector.close()

    def _hand_out(self) -> Iterator[tuple[int, Outcome]]:
        """Give samples to workers until enough are busy."""
        while self._waiting and sum(not task.hangs for task in self._tasks) < self._workers:
            try:
                worker = self._idle.pop() if self._idle else self._nursery.start()
            except (RewardSpecError, WorkerCrash) as error:  # the file loaded once, and no longer does
                yield from self._give_up({"failure": ["crash", f"the reward cannot be loaded again: {error}"]})
                return
            size = self._pace.job_size(len(self._waiting), self._workers)
            task = _Task(worker, deque(self._waiting.popleft() for _ in range(size)), time.monotonic())
            self._tasks.append(task)
            self._selector.register(worker.connection, selectors.EVENT_READ, task)
            job = {
                "samples": [self._samples[index] for index in task.indices],
                "whole": False,
                "cpu_seconds": self._pace.timeout * (os.cpu_count() or 1),
            }
            try:
                worker.send(job)
            except OSError:
                yield from self._lose(task)

    def _collect(self, task: _Task) -> Iterator[tuple[int, Outcome]]:
        """Take what a worker has sent."""
        try:
            outcomes = task.worker.inbox.read()
        except (EOFError, OSError, ValueError):
            yield from self._lose(task)
            return
        if outcomes and not task.hangs:
            now = time.monotonic()
            if task.worker.scored:
                self._pace.note((now - task.since) / len(outcomes), len(outcomes))
            else:
                self._pace.note_first(now - task.since)
            task.since, task.looked = now, None
        for outcome in outcomes[
            : len(task.indices)
        ]:  # one that was set aside may have gone on to samples taken from it
            self._scored += 1
            self._timeouts_in_a_row = 0
            task.worker.scored += 1
            yield task.indices.popleft(), outcome
        if not task.indices:
            self._release(task)

    def _release(self, task: _Task) -> None:
        """Keep a worker that has done its samples for others, unless it was slowed down or has done many."""
        self._forget(task)
        if task.hangs or task.worker.scored >= RETIREMENT:
            self._nursery.bury(task.worker)
        else:
            self._idle.append(task.worker)

    def _lose(self, task: _Task) -> Iterator[tuple[int, Outcome]]:
        """Note that a worker has died: its first sample failed, the others are for other workers."""
        end = self._drop(task)
        self._timeouts_in_a_row = 0
        yield task.indices.popleft(), {"failure": [end.cause, f"the worker {end}"]}
        self._waiting.extendleft(reversed(task.indices))

    def _drop(self, task: _Task) -> WorkerCrash:
        self._forget(task)
        return self._nursery.bury(task.worker)

    def _forget(self, task: _Task) -> None:
        self._tasks.remove(task)
        self._selector.unregister(task.worker.connection)

    def _watch(self) -> Iterator[tuple[int, Outcome]]:
        """Find the workers that hang, and end those whose time is over."""
        now = time.monotonic()
        busy = [task for task in self._tasks if not task.hangs]
        if self._waiting or busy:
            self._honest_end = None
        elif self._honest_end is None:
            self._honest_end = now
        for task in list(self._tasks):
            if self._is_over(task, now):
                self._drop(task)
                self._timeouts_in_a_row += 1
                yield task.indices.popleft(), {"failure": ["timeout", f"no score after {self._pace.timeout:g} s"]}
                self._waiting.extendleft(reversed(task.indices))
            elif task.hangs or now - task.since < self._slow(task):
                continue
            elif task.looked is None:
                task.look(now)
            elif task.had(now) - (task.looked - task.since) >= self._slow(task) and self._may_hang_beside():
                self._set_aside(task)
        patience = max(TIMEOUTS_IN_A_ROW, self._workers)
        if self._timeouts_in_a_row >= patience:
            message = f"not tried: the {patience} answers before it each took longer than {self._pace.timeout:g} s"
            yield from self._give_up({"failure": ["timeout", message]})

    def _slow(self, task: _Task) -> float:
        return self._pace.slow(first=not task.worker.scored)

    def _may_hang_beside(self) -> bool:
        """Whether one more worker may hang: few while hardly anything has been scored, lest everything hangs."""
        hanging = sum(task.hangs for task in self._tasks)
        return hanging < min(MAX_HANGING, max(TIMEOUTS_IN_A_ROW - 1, self._workers - 1, self._scored // 10))

    def _set_aside(self, task: _Task) -> None:
        task.hangs = True
        self._waiting.extendleft(list(task.indices)[:0:-1])
        task.indices = deque([task.indices[0]])
        with contextlib.suppress(AttributeError, OSError):  # where the system cannot, it shares the processors
            os.sched_setscheduler(task.worker.pid, os.SCHED_IDLE, os.sched_param(0))

    def _is_over(self, task: _Task, now: float) -> bool:
        """Whether a sample has had its time.

        It is the time that the sample could have used: what its worker waited for a processor, behind honest work, does
        not count. But no sample outlives the rest of the batch by more than its time, nor when too many hang.
        """
        timeout = self._pace.timeout
        if now - task.since < timeout:
            return False
        if task.had(now) >= timeout:
            return True
        if self._honest_end is not None:
            return now - max(self._honest_end, task.since) >= timeout
        return sum(other.hangs for other in self._tasks) >= MAX_HANGING

    def _patience(self) -> float:
        """Return how many seconds may pass until `_watch` has something to do."""
        now, due = time.monotonic(), []
        for task in self._tasks:
            due.append(task.since + self._pace.timeout)
            if not task.hangs:
                due.append((task.looked or task.since) + self._slow(task))
        # What is due already waits for something else: a processor, a place beside, or the end of honest work.
        return max(0.0, min(moment - now if moment > now else _LOOK_AGAIN for moment in due))

    def _give_up(self, outcome: Outcome) -> Iterator[tuple[int, Outcome]]:
        while self._waiting:
            yield self._waiting.popleft(), outcome


def score_whole(
    worker: Worker, samples: Sequence[Mapping[str, Any]], seconds: float, cpu_seconds: float
) -> list[Outcome] | Outcome:
    """Score samples in one call. Raises TimeoutError, EOFError, OSError or ValueError if the worker is lost."""
    worker.send({"samples": list(samples), "whole": True, "cpu_seconds": cpu_seconds})
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(worker.connection, selectors.EVENT_READ)
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            if selector.select(remaining):
                for answer in worker.inbox.read():
                    return answer


def _waited(pid: int) -> float:
    """Return the seconds that a process was ready to run and had no processor; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
