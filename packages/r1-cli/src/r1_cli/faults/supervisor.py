"""Run `r1 train` and `r1 sft` in a child process, which is started again if the system kills it.

The parent imports nothing large, so that it survives where memory runs out.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from r1_cli.faults.processes import descendants_of, kill_all, state_of

COMMANDS = ("train", "sft")
# Ends that no user and no code of r1 asks for: out of memory, a fault in a library.
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SECOND = 1.0  # between two looks at the child
STOPPED_SECONDS = 15  # after which a stopped child is killed and started again
EARLY_DEATHS = 5  # in a row of children that were started again and killed before they trained
SAME_SECONDS = 0.5
DIES_WITH_PARENT, ADOPTS_ORPHANS = 1, 36  # options of prctl


@dataclass(slots=True)
class Supervised:
    """What the child knows of its parent and of its predecessors."""

    began: float = field(default_factory=time.time)  # when the user typed the command
    pipe: int | None = None  # to the parent; None: there is none
    death: str | None = None  # what the predecessor died of, until the run has recorded it
    died: float = 0.0  # when

    def arm(self, armed: bool = True) -> None:
        """Tell the parent whether to start the command again if this process is killed."""
        if self.pipe is not None:
            os.write(self.pipe, b"1" if armed else b"0")

    def is_repeated(self, seconds: float) -> bool:
        """Whether a signal likely came `seconds` ago already: to all processes, and passed on by the parent."""
        return self.pipe is not None and seconds < SAME_SECONDS


supervised = Supervised()  # of this process


def supervise_command() -> None:
    """Call `supervise` if this process is a command that trains."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS and hasattr(signal, "sigtimedwait"):
        supervise()


def supervise() -> None:
    """Return in the child, which runs the command. The parent never returns: it exits as the last child did."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (*FORWARDED, signal.SIGCHLD))
    _prctl(ADOPTS_ORPHANS, 1)
    early = 0  # deaths in a row before the run trained again
    while True:
        parent, (reading, writing) = os.getpid(), os.pipe()
        if not (child := os.fork()):
            os.close(reading)
            _prctl(DIES_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            supervised.pipe = writing
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGCHLD))
            return
        os.close(writing)
        status, stopped, ended_by_user = _watch(child)
        os.set_blocking(reading, False)  # what the child has forked may still hold the other end
        armed = b""
        with suppress(BlockingIOError):
            armed = os.read(reading, 4096)[-1:]
        os.close(reading)
        early = early + 1 if not armed and supervised.death else 0
        again = armed == b"1" or 0 < early <= EARLY_DEATHS
        if ended_by_user or not (again and os.WIFSIGNALED(status) and os.WTERMSIG(status) in FATAL):
            _exit_as(status)
        _kill_orphans()
        supervised.died = time.time()
        name = signal.Signals(os.WTERMSIG(status)).name
        supervised.death = (
            f"the run's process {child} was stopped for {STOPPED_SECONDS} s and killed"
            if stopped
            else f"the run's process {child} was killed by {name}, as the system does where memory runs out"
        )


def _watch(child: int) -> tuple[int, bool, bool]:
    """Wait for the end of the child; return its status, whether it was stopped, and whether the user has ended it."""
    looks, stopped, ended_by_user = 0, False, False
    while True:
        info = signal.sigtimedwait((*FORWARDED, signal.SIGCHLD), SECOND)
        if info is not None and info.si_signo in FORWARDED:
            ended_by_user = True
            if info.si_code <= 0:  # sent by a process to this one; the terminal sends it to the child, too
                with suppress(ProcessLookupError):
                    os.kill(child, info.si_signo)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1, False, ended_by_user
            if pid == child:
                return status, stopped, ended_by_user
            if not pid:
                break
        # The terminal's Ctrl-Z stops this process as well, which then counts nothing.
        looks = looks + 1 if info is None and state_of(child) == "T" else looks if info else 0
        if looks >= STOPPED_SECONDS and not ended_by_user:
            stopped = True
            os.kill(child, signal.SIGKILL)


def _kill_orphans() -> None:
    """End what a killed child has left: they are this process's children now."""
    while left := descendants_of(os.getpid()):
        kill_all(left)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _exit_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value)
