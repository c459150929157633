"""One killable worker process, as the pool sees it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r1_rewards import frames
from r1_rewards.spec import RewardSpec, RewardSpecError

START_TIMEOUT = 300.0  # seconds to import a reward file and what it imports


class WorkerCrash(Exception):
    """The worker process ended by itself; the message says how."""


class WorkerClosed(Exception):
    """The pool was closed while the worker was needed."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a worker says of the reward that it has loaded."""

    name: str
    batch: bool


class WorkerProcess:
    """A process that loads one reward, in a process group of its own, started when needed and again after its death.

    `start`, `ask` and `stop` belong to one thread at a time, and `start` to a thread that lives as long as the worker:
    Linux kills the worker when the thread that started it ends, which is how it dies with its parent. `kill` may be
    called from any thread. The worker sees no GPU (`CUDA_VISIBLE_DEVICES` is empty); the rest of the environment is
    passed on, API keys included, because a reward that asks a judge model needs them.
    """

    def __init__(self, spec: RewardSpec, kwargs: Mapping[str, Any]) -> None:
        self._setup = {"function": spec.function, "path": str(spec.path or ""), "kwargs": dict(kwargs)}
        self._lock = threading.RLock()  # a signal handler may call `kill` while the same thread is in it
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> Reward:
        """Start the process if there is none and load the reward.

        Raises RewardSpecError with the worker's message, WorkerCrash if it dies or takes longer than START_TIMEOUT.
        """
        try:
            connection = self._launch()
        except OSError as error:
            raise WorkerCrash(f"a worker process cannot be started: {error}") from error
        deadline = time.monotonic() + START_TIMEOUT
        try:
            frames.send(connection, self._setup, deadline)
            answer = frames.receive(connection, deadline)
        except TimeoutError as error:
            self.stop()
            raise WorkerCrash(f"loading the reward took longer than {START_TIMEOUT:g} s") from error
        except (EOFError, OSError) as error:
            raise WorkerCrash(f"while loading the reward, the worker {self.stop()}") from error
        if "error" in answer:
            self.stop()
            raise RewardSpecError(answer["error"])
        return Reward(answer["name"], answer["batch"])

    def ask(self, samples: Sequence[Mapping[str, Any]], timeout: float) -> Any:
        """Return the worker's outcomes for `samples`; starting the worker does not count against `timeout` (seconds).

        Raises TimeoutError after killing the worker, WorkerCrash, or what `start` raises.
        """
        if self._connection is None:
            self.start()
        assert self._connection is not None
        deadline = time.monotonic() + timeout
        try:
            frames.send(self._connection, samples, deadline)
            return frames.receive(self._connection, deadline)
        except TimeoutError:
            self.stop()
            raise
        except (EOFError, OSError, ValueError) as error:
            raise WorkerCrash(f"the worker {self.stop()}") from error

    def kill(self, close: bool = False) -> None:
        """Kill the process group at once, from any thread; with `close`, never start it again."""
        with self._lock:
            self._closed = self._closed or close
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> str:
        """Kill the process group, reap the process, and return how it ended, as in "exited with code 3"."""
        self.kill()
        with self._lock:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if process is None:
            return "was not running"
        code = process.wait()
        if code >= 0:
            return f"exited with code {code}"
        hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._closed:
                ours.close()
                raise WorkerClosed
            # -P keeps the working directory, and a file called math.py in it, off the front of the module path.
            command = [sys.executable, "-P", "-m", "r1_rewards.worker", str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
            self._connection = ours
        return ours
