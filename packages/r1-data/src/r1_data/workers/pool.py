"""Worker processes for media that nobody vouches for: bounded memory, a deadline a task, and a death costs one task.

Decoders are C code that reads what strangers wrote. A file that makes one crash, hang or swell takes a worker with it
and not the run; the worker is started again, and the caller learns which task it was.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import LifoQueue
from typing import Any

from r1_data.workers.transfer import receive, send

# What every worker needs and takes long to import; the server that workers are forked from has it ready.
_PRELOAD = [
    "r1_data.render",
    "torch",
    "torchvision.transforms.v2.functional",
    "transformers.image_processing_backends",
    "transformers.video_processing_utils",
    "transformers.tokenization_utils_tokenizers",
]
_START = 300.0  # seconds until a worker has loaded what it needs
_RESTART = 10.0  # seconds in which a fork server that was killed is started again
_FORKING = threading.Lock()
_ENDING = 60.0  # seconds until a worker that has hung up is gone, and how it ended is known
# How a worker ends that somebody else may have ended; the last is what is known where the server it was forked from is
# gone as well.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 255)
_PAGE = 4096  # bytes, the unit of /proc/self/statm

# Is told of a piece of work, in the thread that waited for it: its name, its beginning and end by `time.perf_counter`.
Ended = Callable[[str, float, float], None]


class WorkerDied(Exception):
    """A worker crashed, or was ended because its task took too long; the message says which."""

    killed = False  # by somebody else, as the system does where memory is short


class Workers:
    """Processes that hold a copy of one object and call its methods.

    The object travels to each worker once, as multiprocessing does it. A script that makes workers must guard its own
    start with `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        target: Any,
        count: int,
        *,
        memory_bytes: int = 4 * 2**30,
        seconds: float = 120.0,
        ended: Ended | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            target: what the workers work with; it must survive pickling.
            count: processes at most, each started when first needed.
            memory_bytes: how much each may take beyond what it has after loading.
            seconds: how long one task may take.
            ended: is told of each task when it has ended.
        """
        self._ended = ended
        self.count, self._target, self._memory_bytes, self._seconds = count, target, memory_bytes, seconds
        self._threads = ThreadPoolExecutor(count, "r1-data", initializer=_compute_alone)
        self._idle: LifoQueue[_Process | None] = LifoQueue()  # None: one that is not running
        for _ in range(count):
            self._idle.put(None)

    def submit(self, method: str, *arguments: Any, then: Callable[[Any], Any] | None = None) -> "Future[Any]":
        """Call a method of the target in a worker, and `then` in a thread of this process with what it returned.

        The future raises what the method raised, WorkerDied, or RuntimeError where no worker can be started.
        """
        return self._threads.submit(self._run, method, arguments, then)

    def compute(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Call a function in a thread of this process, as `submit` calls `then`."""
        return self._threads.submit(function, *arguments)

    def close(self) -> None:
        """Forget what waits, let what runs end, and stop the processes."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (process := self._idle.get()) is not None:
                process.stop()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, method: str, arguments: tuple[Any, ...], then: Callable[[Any], Any] | None) -> Any:
        begin = time.perf_counter()
        try:
            result = self._ask(method, arguments)
            return then(result) if then else result
        finally:
            if self._ended is not None:
                self._ended(method, begin, time.perf_counter())

    def _ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return what a worker, whichever is free, says."""
        process = self._idle.get()
        try:
            process = process or _Process(self._target, self._memory_bytes)
            try:
                good, result = process.ask((method, arguments), self._seconds)
            except WorkerDied as death:
                if not death.killed:
                    raise
                process = None  # should no other one start
                process = _Process(self._target, self._memory_bytes)  # the task may have had no part in it
                good, result = process.ask((method, arguments), self._seconds)
        except WorkerDied:
            process = None
            raise
        finally:
            self._idle.put(process)
        if not good:
            raise result
        return result


def start_early() -> None:
    """Start the process that workers are forked from, which imports what they need, and do not wait for it."""
    from multiprocessing import forkserver

    get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


class _Process:
    """One worker, as its thread in the parent sees it."""

    def __init__(self, target: Any, memory_bytes: int) -> None:
        """Start a worker and wait until it has loaded the target. Raises RuntimeError if it ends before.

        A worker that was killed meanwhile from outside is started once more.
        """
        for attempt in (1, 2):
            self._connection, self._process = _fork(target, memory_bytes)
            try:
                if not self._connection.poll(_START):
                    raise EOFError
                self._connection.recv()
                return
            except (EOFError, OSError):
                self._process.join(_ENDING)
                code = self._process.exitcode
                self.stop()
                if code not in _FROM_OUTSIDE or attempt == 2:
                    raise RuntimeError(
                        "a worker process for media did not start; what it said stands above. A script that starts "
                        'workers must do so below `if __name__ == "__main__":`'
                    ) from None

    def ask(self, request: Any, seconds: float) -> tuple[bool, Any]:
        """Send a request and wait for (whether it went well, result or exception). Raises WorkerDied."""
        try:
            self._connection.send(request)
            reply: tuple[bool, Any] = receive(self._connection, seconds)
            return reply
        except TimeoutError:
            self.stop()
            raise WorkerDied(f"it took longer than {seconds:g} seconds") from None
        except (EOFError, OSError):
            self._process.join(_ENDING)  # else `stop` would be what ended it
            code = self._process.exitcode
            self.stop()
            death = WorkerDied(f"its worker process ended by itself (exit code {code})")
            death.killed = code in _FROM_OUTSIDE
            raise death from None

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def _fork(target: Any, memory_bytes: int) -> "tuple[connection.Connection[Any, Any], BaseProcess]":
    """Fork a worker and return our end of its pipe, and its process.

    A fork server that was killed a moment ago refuses, or hangs up, until the system has reaped it: asked again, it is
    started anew. One thread asks at a time, because multiprocessing replaces the server's address without a lock.
    """
    context = get_context("forkserver")  # forked from a process without threads, which fork would break
    context.set_forkserver_preload(_PRELOAD)
    deadline = time.monotonic() + _RESTART
    while True:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, target, memory_bytes), daemon=True)
        try:
            with _FORKING:
                process.start()
            return ours, process
        except (EOFError, OSError):
            ours.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        finally:
            theirs.close()


def _compute_alone() -> None:
    """Limit OpenMP to one thread for what this thread computes.

    Threads that each have a team of their own outnumber the processors. OpenMP's waiting threads then sleep at once
    instead of spinning a little, and a training step of a small model takes twice as long.

    `torch.set_num_threads` would not do: other threads take over the number that it sets when they first compute. The
    main thread, if it first computed in that moment, trained with one thread, and its numbers had other last bits.
    OpenMP's own function sets the number of the calling thread alone. Without OpenMP, nothing is limited.
    """
    import torch

    torch.get_num_threads()  # takes over torch's number now, or it would replace the one that is set here
    set_threads = getattr(ctypes.CDLL(torch._C.__file__), "omp_set_num_threads", None)  # in what torch is linked to
    if set_threads is not None:
        set_threads(1)


def _serve(pipe: "connection.Connection[Any, Any]", target: Any, memory_bytes: int) -> None:
    """Answer requests until the pipe closes."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers side by side are parallel enough
    # Tensors go as plain arrays; torch's own way would keep a shared memory file open for each.
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    _limit_memory(memory_bytes)
    pipe.send("ready")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = pipe.recv()
            try:
                reply = (True, getattr(target, method)(*arguments))
            except MemoryError:
                reply = (False, WorkerDied(f"it needs more than {memory_bytes:,} bytes of memory"))
            except Exception as error:
                reply = (False, error)
            send(pipe, reply)


def _reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """A tensor as the array that lies in memory, and the order of its axes there: nothing is laid out anew."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return _restore_tensor, (tensor.permute(order).contiguous().numpy(), order)


def _restore_tensor(array: Any, order: list[int]) -> Any:
    import torch

    return torch.from_numpy(array).permute([order.index(axis) for axis in range(len(order))])


def _limit_memory(more: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
