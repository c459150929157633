"""Stop a run on Ctrl-C, SIGTERM or SIGUSR1 without losing what it learned."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from r1_cli.faults.supervisor import supervised

log = logging.getLogger("r1")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # schedulers can be told to send the last one
CLEANUP_SECONDS = 4.0  # of the grace, in which the processes of the run end


class Stopped(Exception):
    """Raised where the run can stop at once: nothing was learned since the last whole step."""


class GraceOver(SystemExit):
    """Ends a run in the middle of a step or of a checkpoint, as a scheduler would kill it soon."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StopRequest:
    """Remembers the first signal; the second one ends the process at once.

    The loop calls `check` between two steps. Inside `interruptible()` (sampling and scoring, which change no
    weights and may take minutes) the first signal raises `Stopped`. If the run still goes on shortly before the `grace`
    of a scheduler's signal is over, `GraceOver` is raised in the main thread, and if that does not end the process,
    `kill` does.

    Args:
        grace: seconds between a signal and the end of the process; None: no limit. Ctrl-C has none.
        resumes_from: says what the next start resumes from.
        kill: ends this process and those that it has started, with this exit code.
    """

    def __init__(
        self,
        grace: float | None = None,
        resumes_from: Callable[[], object] = lambda: None,
        kill: Callable[[int], None] = os._exit,
    ) -> None:
        self.signal_name: str | None = None
        self._interruptible = False
        self._came = 0.0  # when the first signal came
        self._grace, self._resumes_from, self._kill = grace, resumes_from, kill
        self._over = False
        self._timers: list[threading.Timer] = []

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    @property
    def exit_code(self) -> int:
        """The exit code, as shells have it: 130 after Ctrl-C, 143 after SIGTERM, 138 after SIGUSR1, else 0."""
        return 128 + signal.Signals[self.signal_name] if self.signal_name else 0

    def check(self) -> None:
        if self.signal_name is not None:
            raise Stopped(self.signal_name)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle signals inside the block; in a thread other than the main one, which gets none, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield self
        finally:
            if not self._over:
                for timer in self._timers:
                    timer.cancel()
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over:
            reason = (
                f"{self.signal_name}: {self._grace:g} seconds are nearly over (trainer.stop_seconds). The step that "
                f"was not whole is lost; the next start resumes from {self._resumes_from() or 'the beginning'}"
            )
            log.warning("%s", reason)
            raise GraceOver(self.exit_code, reason)
        now = time.monotonic()
        if self.requested:
            if supervised.is_repeated(now - self._came):
                return
            raise KeyboardInterrupt
        self._came = now
        supervised.arm(False)
        self.signal_name = signal.Signals(number).name
        if self._grace is not None and number != signal.SIGINT:
            self._begin_grace(self._grace)
        if self._interruptible:
            raise Stopped(self.signal_name)

    def _begin_grace(self, seconds: float) -> None:
        def leave() -> None:
            self._over = True
            os.kill(os.getpid(), signal.SIGTERM)

        soft = seconds - min(CLEANUP_SECONDS, seconds / 2)
        hard = seconds - min(CLEANUP_SECONDS / 4, seconds / 4)
        self._timers = [threading.Timer(soft, leave), threading.Timer(hard, self._kill, [self.exit_code])]
        for timer in self._timers:
            timer.daemon = True
            timer.start()
