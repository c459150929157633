"""Start, reap and kill worker processes, which are forked from a server that has loaded a user's code."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from r1_rewards.types import Cause, RewardSpecError
from r1_rewards.workers import frames
from r1_rewards.workers.descendants import kill_tree

START_TIMEOUT = 300.0  # seconds to import a user's file and what it imports
GARBLED = "the worker's first message is garbled: does the {}'s file change json or sys?"
SEND_TIMEOUT = 60.0  # seconds for an idle worker to read what it is sent

# Variables that the run itself uses for the hub, trackers, servers and other machines. A tool or agent that prints its
# environment into an answer must not show them. R1_WORKER_SECRETS=NAME,NAME passes some on, and so does an
# option that names one.
REWARDS_TOKEN = "R1_REWARDS_TOKEN"
RUN_SECRETS = frozenset({
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_PASSWORD", "R1_METRICS_TOKEN", REWARDS_TOKEN, "R1_SERVERS_TOKEN", "RAY_AUTH_TOKEN",
    "VLLM_API_KEY",
})  # fmt: skip
PASSED_ON = "R1_WORKER_SECRETS"


class WorkerCrash(Exception):
    """The worker process ended by itself; the message says how.

    `from_outside`: it may have been killed from outside, as by the out-of-memory killer, or its fork server was.
    """

    def __init__(self, message: str, cause: Cause = "crash", *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.from_outside = from_outside


class WorkerClosed(Exception):
    pass


class Worker:
    def __init__(
        self,
        pid: int,
        connection: socket.socket,
        process: "subprocess.Popen[bytes] | None" = None,
        server: socket.socket | None = None,
    ) -> None:
        self.pid = pid
        self.connection = connection
        self.process = process  # None if a fork server forked it
        self.server = server  # the connection of that fork server, which alone can reap it
        self.inbox = frames.Inbox(connection)
        self.scored = 0  # samples

    def send(self, job: object, seconds: float = SEND_TIMEOUT) -> None:
        """Send JSON; outcomes arrive in `inbox`. Raises OSError if the worker is dead or does not read."""
        frames.send(self.connection, job, time.monotonic() + seconds)

    def kill(self) -> None:
        kill_tree(self.pid)


class ForkServer:
    """Starts and reaps workers that have loaded a user's code.

    Workers see no GPU (`CUDA_VISIBLE_DEVICES` is empty) and inherit the environment without `RUN_SECRETS`: the API keys
    of services that a user's code calls are in it. They die with the caller's process. Only `close` is thread-safe.
    """

    def __init__(self, module: str, kind: str, setup: Mapping[str, object]) -> None:
        """`module` is what a worker runs, "reward" or another `kind` what it loads, `setup` its first message."""
        self._module, self._kind, self._setup = module, kind, dict(setup)
        self._lock = threading.RLock()  # a signal handler may call `close` while the same thread is in it
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None  # that forks
        self._connection: socket.socket | None = None
        self._unforked: Worker | None = None  # where the code cannot be forked: loaded, and not yet in use
        self._living: set[Worker] = set()

    def load(self) -> Mapping[str, Any]:
        """Return the worker's description of what it loaded. Raises RewardSpecError, WorkerCrash, WorkerClosed.

        Tries again if the worker is killed from outside.
        """
        for tries_left in (2, 1, 0):
            try:
                return self._load()
            except WorkerCrash as error:
                if not (error.from_outside and tries_left):
                    raise
        raise AssertionError

    def _load(self) -> Mapping[str, Any]:
        try:
            process, connection = self._launch()
        except OSError as error:
            raise WorkerCrash(f"a worker process cannot be started: {error}") from error
        try:
            frames.send(connection, self._setup, time.monotonic() + START_TIMEOUT)
            reply = frames.receive(connection, time.monotonic() + START_TIMEOUT)
        except TimeoutError as error:
            self._end_server()
            raise WorkerCrash(f"loading the {self._kind} took longer than {START_TIMEOUT:g} s") from error
        except (EOFError, OSError) as error:
            end = self._end_server()
            message = f"while loading the {self._kind}, the worker {end}"
            raise WorkerCrash(message, end.cause, from_outside=end.from_outside) from error
        if not isinstance(reply, Mapping) or not reply.keys() & {"error", "forks"}:
            self._end_server()
            raise RewardSpecError(GARBLED.format(self._kind))
        if "error" in reply:
            self._end_server()
            raise RewardSpecError(reply["error"])
        if not reply["forks"]:
            with self._lock:
                self._unforked = Worker(process.pid, connection, process)
                self._living.add(self._unforked)
                self._process = self._connection = None
        return reply

    def start(self) -> Worker:
        """Raises WorkerClosed, and RewardSpecError or WorkerCrash if loading fails."""
        with self._lock:
            if self._closed:
                raise WorkerClosed
        for _ in range(3):
            if self._unforked is None and self._connection is None:
                self.load()
            if self._unforked is not None:
                worker, self._unforked = self._unforked, None
                return worker
            with contextlib.suppress(OSError, EOFError):
                return self._fork()
            self._end_server()
        raise WorkerCrash("workers cannot be started any more")

    def reap(self, worker: Worker) -> WorkerCrash:
        worker.connection.close()
        orphaned = WorkerCrash("ended together with the process that had started it", from_outside=True)
        if worker.process is None and worker.server is not self._connection:
            return orphaned  # killed in `_end_server`; its number may be another process's by now
        worker.kill()
        with self._lock:
            self._living.discard(worker)
        if worker.process is not None:
            return _describe(worker.process.wait())
        try:
            assert self._connection is not None
            self._connection.settimeout(None)
            self._connection.sendall(b"R")
            frames.send(self._connection, worker.pid)
            return _describe(frames.receive(self._connection))
        except (OSError, EOFError, AssertionError):
            return orphaned

    def pids(self) -> list[int]:
        with self._lock:
            return [worker.pid for worker in self._living] + ([self._process.pid] if self._process else [])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for worker in self._living:
                worker.kill()
            if self._process is not None and self._process.returncode is None:
                kill_tree(self._process.pid)

    def dispose(self) -> None:
        for worker in list(self._living):
            self.reap(worker)
        if self._process is not None:
            self._end_server()

    def _fork(self) -> Worker:
        assert self._connection is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._connection.settimeout(START_TIMEOUT)
                socket.send_fds(self._connection, [b"F"], [theirs.fileno()])
                pid = frames.receive(self._connection, time.monotonic() + START_TIMEOUT)
        except BaseException:
            ours.close()
            raise
        worker = Worker(pid, ours, server=self._connection)
        with self._lock:
            self._living.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _end_server(self) -> WorkerCrash:
        assert self._process is not None
        assert self._connection is not None
        self._connection.close()
        kill_tree(self._process.pid)
        code = self._process.wait()
        with self._lock:
            for worker in [one for one in self._living if one.server is self._connection]:
                worker.kill()
                self._living.discard(worker)
            self._process = self._connection = None
        return _describe(code)

    def _launch(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._closed:
                ours.close()
                raise WorkerClosed
            process = subprocess.Popen(
                # -P keeps the working directory, and a file called math.py in it, off the front of the module path.
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**without_secrets(os.environ, self._setup), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
            self._process, self._connection = process, ours
        return process, ours


def without_secrets(environment: Mapping[str, str], setup: Mapping[str, object]) -> dict[str, str]:
    """Return the variables that a worker inherits: with the secrets that an option of its setup names.

    A built-in reward, which has no path, may be a sum with a part that asks a reward server.
    """
    options = json.dumps(setup)
    hidden = {name for name in RUN_SECRETS if name not in options} - {*environment.get(PASSED_ON, "").split(",")}
    if setup.get("path") == "":
        hidden.discard(REWARDS_TOKEN)
    return {name: value for name, value in environment.items() if name not in hidden}


def _describe(code: int | None) -> WorkerCrash:
    if code is None:
        return WorkerCrash("ended, and its exit code is unknown")
    if code >= 0:
        return WorkerCrash(f"exited with code {code}")
    if -code == signal.SIGXCPU:
        return WorkerCrash("was killed by SIGXCPU: it used too much processor time", "timeout")
    hint = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
    from_outside = -code in (signal.SIGKILL, signal.SIGTERM)
    return WorkerCrash(f"was killed by {signal.Signals(-code).name}{hint}", from_outside=from_outside)
