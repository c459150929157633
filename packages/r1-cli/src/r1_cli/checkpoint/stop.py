"""Stop a run on Ctrl-C, SIGTERM or SIGUSR1 without losing what it learned."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from r1_cli.faults.supervisor import supervised

log = logging.getLogger("r1")

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)  # signals that schedulers send
SIGNALS = (signal.SIGINT, *SCHEDULERS)
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
        self._lock = threading.Lock()

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
            with self._watching():
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

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Begin the grace also while the main thread is in a long call of C, which Python's handlers wait for.

        The interpreter writes the number of each signal to a socket at once, and a thread reads it there.
        """
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:  # of an event loop in this thread
            signal.set_wakeup_fd(before)
        reader = threading.Thread(target=self._read_signals, args=(ours,), name="r1-signals", daemon=True)
        reader.start()
        try:
            yield
        finally:
            if before == -1:
                signal.set_wakeup_fd(-1)
            theirs.close()  # which ends the reader
            reader.join()
            ours.close()

    def _read_signals(self, numbers: socket.socket) -> None:
        while read := numbers.recv(64):
            for number in read:
                if number in SCHEDULERS:
                    self._begin_grace(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = self.signal_name
        self.signal_name = name or signal.Signals(number).name
        if self._over:
            log.warning("%s", self._reason())
            raise GraceOver(self.exit_code, self._reason())
        now = time.monotonic()
        if name is not None:
            if supervised.is_repeated(now - self._came):
                return
            raise KeyboardInterrupt
        self._came = now
        supervised.arm(False)
        if number in SCHEDULERS:
            self._begin_grace(number)
        if self._interruptible:
            raise Stopped(self.signal_name)

    def _reason(self) -> str:
        return (
            f"{self.signal_name or 'a signal'}: {self._grace:g} seconds are nearly over (trainer.stop_seconds). The "
            f"step that was not whole is lost; the next start resumes from {self._resumes_from() or 'the beginning'}"
        )

    def _begin_grace(self, number: int) -> None:
        def leave() -> None:
            self._over = True
            os.kill(os.getpid(), number)

        def kill() -> None:
            log.warning("%s", self._reason())
            self._kill(128 + number)

        with self._lock:
            if self._grace is None or self._timers:
                return
            supervised.arm(False)  # which the handler cannot do yet in a long call
            soft = self._grace - min(CLEANUP_SECONDS, self._grace / 2)
            hard = self._grace - min(CLEANUP_SECONDS / 2, self._grace / 4)
            self._timers = [threading.Timer(soft, leave), threading.Timer(hard, kill)]
        for timer in self._timers:
            timer.daemon = True
            timer.start()
