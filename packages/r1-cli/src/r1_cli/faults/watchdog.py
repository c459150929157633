"""Notice processes that are stopped and phases that do not end, and break them off, so that the run can start again."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from r1_cli.faults.processes import descendants_of, kill_all, state_of, title_of
from r1_cli.faults.stacks import write_dump

log = logging.getLogger("r1")

LOOK_SECONDS = 1.0  # between two looks at the phase
STOPPED_LOOKS = 10  # in a row at which a process is stopped, after which it is killed
TIMES_SLOWEST = 10  # of the phase so far
LEAST_SECONDS = 60.0  # a deadline is never shorter
# Phases that may wait for a server of others, such as a reward's or a teacher's. A request to one has a deadline of its
# own (`r1_rewards.services.endpoint.Patience`, 600 s), and a server that restarts is worth waiting for.
ASKING = ("gen", "reward", "score", "teacher", "validation", "wait")
LEAST_ASKING_SECONDS = 900.0
GRACE_SECONDS = 30.0  # for the driver to notice that the processes it waits for are gone
WHOLE = "step"  # contains the other phases
BREAK = signal.Signals(getattr(signal, "SIGRTMIN", signal.SIGALRM))  # schedulers send SIGUSR1 to end a run


class HungError(RuntimeError):
    """A phase did not end within its deadline; the message names it and the folder with the stacks."""


@dataclass(slots=True)
class Watchdog:
    """Watches the phases of a run's steps from a thread of the driver.

    A phase's deadline is `TIMES_SLOWEST` times its slowest end so far, at least `LEAST_SECONDS` (of a phase that asks
    servers `LEAST_ASKING_SECONDS`), at most `ceiling`. The history stays when the run starts again.
    """

    folder: Path | None = None  # the run's; None: nothing is watched
    ceiling: float = 7200.0  # seconds
    step: int = 0  # that is being taken
    rows: Callable[[], Sequence[int]] = tuple  # of the step's batch, in the data set
    cause: str | None = None  # why a phase was broken off, until `take_cause`
    _slowest: dict[str, float] = field(default_factory=dict)  # seconds by phase
    _phases: list[tuple[str, float]] = field(default_factory=list)  # begun and not ended, with `time.monotonic`
    _looks: dict[int, int] = field(default_factory=dict)  # in a row at which a process was stopped

    def begin_step(self, step: int, rows: Callable[[], Sequence[int]]) -> None:
        self.step, self.rows = step, rows

    def begun(self, phase: str) -> None:
        self._phases.append((phase, time.monotonic()))

    def ended(self, phase: str, begin: float, end: float) -> None:
        if phase not in {name for name, _ in self._phases}:  # work in the background
            return
        while self._phases.pop()[0] != phase:
            pass
        self._slowest[phase] = max(self._slowest.get(phase, 0.0), end - begin)

    def deadline_of(self, phase: str) -> float:
        """Return the seconds within which a phase must end."""
        if phase not in self._slowest:
            return self.ceiling
        least = LEAST_ASKING_SECONDS if phase in ASKING else LEAST_SECONDS
        return min(self.ceiling, max(least, TIMES_SLOWEST * self._slowest[phase]))

    def take_cause(self) -> str | None:
        cause, self.cause = self.cause, None
        return cause

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Kill stopped processes inside the block, also while the run starts."""
        with _repeating(lambda over: self.kill_stopped()):
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block, which must be in the main thread to be broken off there."""
        if self.folder is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._phases.clear()
        before = signal.signal(BREAK, self._raise)
        try:
            with _repeating(self._look):
                yield
        finally:
            signal.signal(BREAK, before)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        raise HungError(self.cause or "a phase has taken too long")

    def _look(self, over: threading.Event) -> None:
        phase = next(((name, since) for name, since in reversed(self._phases[:]) if name != WHOLE), None)
        if phase is not None and time.monotonic() - phase[1] > self.deadline_of(phase[0]):
            self._break_off(phase, over)

    def kill_stopped(self) -> None:
        """Kill processes that the driver has started and that are stopped, as by SIGSTOP: they would hang the rest."""
        stopped = [pid for pid in descendants_of(os.getpid()) if state_of(pid) == "T"]
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in stopped}
        for pid in [pid for pid, looks in self._looks.items() if looks >= STOPPED_LOOKS]:
            phase = self._phases[-1][0] if self._phases else "no phase"
            seconds = int(STOPPED_LOOKS * LOOK_SECONDS)
            told = f"{title_of(pid)}, process {pid}, was stopped for {seconds} s in {phase} and is killed"
            cause, needed = self.cause, _is_actor(pid)
            self._dump(phase, told)
            if not needed:  # a worker of rewards or media: its pool starts another, and no phase is broken off
                self.cause = cause
            kill_all([pid])

    def _break_off(self, phase: tuple[str, float], over: threading.Event) -> None:
        """End the processes of the run that the driver may wait for, then the wait itself, at last the driver."""
        name, limit = phase[0], self.deadline_of(phase[0])
        slowest = f", its slowest before took {self._slowest[name]:.1f} s" if name in self._slowest else ""
        self._dump(name, f"{name} of step {self.step} did not end within {limit:.0f} s{slowest}")
        kill_all([pid for pid in descendants_of(os.getpid()) if _is_actor(pid)])
        for _ in range(2):
            if over.wait(GRACE_SECONDS) or phase not in self._phases:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, BREAK)
        if not over.wait(GRACE_SECONDS) and phase in self._phases:
            os.kill(os.getpid(), signal.SIGKILL)  # the parent starts the run again

    def _dump(self, phase: str, cause: str) -> None:
        self.cause = cause
        assert self.folder is not None
        rows: list[int] = []
        with suppress(Exception):  # the batch may be changing now
            rows = list(self.rows())
        try:
            facts = {"cause": cause, "step": self.step, "rows": rows, "slowest_seconds": self._slowest}
            self.cause = f"{cause}; stacks are in {write_dump(self.folder, phase.replace(' ', '-'), facts)}"
        except OSError as error:
            log.warning("no stacks could be written: %s", error)


@contextmanager
def _repeating(look: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `look` every `LOOK_SECONDS` in a thread, with the event that ends it."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(LOOK_SECONDS):
            look(over)

    thread = threading.Thread(target=repeat, daemon=True, name="r1-watchdog")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _is_actor(pid: int) -> bool:
    """Whether a process is a rank, an engine or a renderer, as they name themselves."""
    return title_of(pid).startswith(("ray::learner-", "ray::engine-", "ray::media-"))
