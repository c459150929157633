"""Stop a run on Ctrl-C or SIGTERM without losing what it learned."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """Raised where the run can stop at once: nothing was learned since the last whole step."""


class StopRequest:
    """Remembers the first signal; the second one ends the process at once.

    The loop calls `check` between two steps. Inside `interruptible()` (sampling and scoring, which change no
    weights and may take minutes) the first signal raises `Stopped`.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._interruptible = False

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    @property
    def exit_code(self) -> int:
        """The exit code, as shells have it: 130 after Ctrl-C, 143 after SIGTERM, 0 without a signal."""
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
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
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
        if self.requested:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
        if self._interruptible:
            raise Stopped(self.signal_name)
