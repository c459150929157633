"""Worker processes with bounded memory and a deadline per task; a worker's death costs one task.

Decoders are C code that reads untrusted files. A file that crashes, hangs or exhausts a worker does not end the run:
the worker is restarted, and the caller learns which task it was.
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
from operator import methodcaller
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, TypeVar

from r1_data.workers.transfer import receive, send

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

Result = TypeVar("Result")

# Slow imports of every worker, preloaded by the fork server.
_PRELOAD = [
    "r1_data.render",
    "torch",
    "torchvision.transforms.v2.functional",
    "transformers.image_processing_backends",
    "transformers.video_processing_utils",
    "transformers.tokenization_utils_tokenizers",
]
_START = 300.0  # seconds for a worker to load its target
_RESTART = 10.0  # seconds to restart a fork server that was killed
_FORKING = threading.Lock()
_ENDING = 60.0  # seconds for a worker that closed its pipe to exit
# Exit codes of a worker that was killed from outside; 255 if its fork server is gone, too.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, 255)
_PAGE = 4096  # bytes, the unit of /proc/self/statm

# Called after a task, in the thread that waited for it, with its name and its start and end by `time.perf_counter`.
Ended = Callable[[str, float, float], None]


class WorkerDied(Exception):
    """A worker crashed, or was killed because its task took too long; the message says which."""

    killed = False  # from outside, as by the system when memory is short


class Workers:
    """Processes that hold a copy of one object, pickled to each once, and call its methods.

    A script that uses workers must guard its entry point with `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        target: object,
        count: int,
        *,
        memory_bytes: int = 4 * 2**30,
        seconds: float = 120.0,
        ended: Ended | None = None,
    ) -> None:
        """No process is started until it is needed.

        Args:
            target: the object; it must pickle.
            count: maximum number of processes.
            memory_bytes: how much each may allocate after loading `target`.
            seconds: time limit of a task.
            ended: called after each task.
        """
        self._ended = ended
        self.count, self._target, self._memory_bytes, self._seconds = count, target, memory_bytes, seconds
        self._threads = ThreadPoolExecutor(count, "r1-data", initializer=compute_alone)
        self._idle: LifoQueue[_Process | None] = LifoQueue()  # None: a process that is not running
        for _ in range(count):
            self._idle.put(None)

    def submit(self, method: str, *arguments: object, then: Callable[[Any], Any] | None = None) -> "Future[Any]":
        """Call a method of the target in a worker, then `then` with its result in a thread of this process.

        The future raises what the method raised, WorkerDied, or RuntimeError if no worker can be started.
        """
        return self._threads.submit(self._run, method, arguments, then)

    def compute(self, function: Callable[..., Result], *arguments: object) -> "Future[Result]":
        """Call a function in a thread of this process."""
        return self._threads.submit(function, *arguments)

    def close(self) -> None:
        """Cancel waiting tasks, finish running ones, and stop the processes."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            if (process := self._idle.get()) is not None:
                process.stop()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, method: str, arguments: tuple[object, ...], then: Callable[[Any], object] | None) -> object:
        begin = time.perf_counter()
        try:
            result = self._ask(method, arguments)
            return then(result) if then else result
        finally:
            if self._ended is not None:
                self._ended(method, begin, time.perf_counter())

    def _ask(self, method: str, arguments: tuple[object, ...]) -> object:
        process = self._idle.get()
        try:
            process = process or _Process(self._target, self._memory_bytes)
            try:
                good, result = process.ask((method, arguments), self._seconds)
            except WorkerDied as death:
                if not death.killed:
                    raise
                process = None  # if no other one starts
                process = _Process(self._target, self._memory_bytes)  # maybe not because of the task
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
    """Start the fork server, which preloads what workers import, without waiting for it."""
    from multiprocessing import forkserver

    get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


class _Process:
    def __init__(self, target: object, memory_bytes: int) -> None:
        """Start a worker, once more if it is killed from outside. Raises RuntimeError if it loads no target."""
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
                        "a worker process for media did not start; its output is above. A script that starts "
                        'workers must do so below `if __name__ == "__main__":`'
                    ) from None

    def ask(self, request: object, seconds: float) -> tuple[bool, Any]:
        try:
            self._connection.send(request)
            reply: tuple[bool, Any] = receive(self._connection, seconds)
            return reply
        except TimeoutError:
            self.stop()
            raise WorkerDied(f"it took longer than {seconds:g} seconds") from None
        except (EOFError, OSError):
            self._process.join(_ENDING)  # before `stop` kills it, to learn its exit code
            code = self._process.exitcode
            self.stop()
            death = WorkerDied(f"its worker process ended by itself (exit code {code})")
            death.killed = code in _FROM_OUTSIDE
            raise death from None

    def stop(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def _fork(target: object, memory_bytes: int) -> "tuple[connection.Connection[object, Any], BaseProcess]":
    """Fork a worker and return our end of its pipe, and its process.

    A fork server that was just killed refuses connections until it is reaped; then multiprocessing restarts it, without
    a lock.
    """
    context = get_context("forkserver")  # threads do not survive a fork; the fork server has none
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


def compute_alone() -> None:
    """Limit OpenMP and MKL to one thread in the calling thread, which it needs once.

    With a second team of OpenMP threads, threads outnumber processors. OpenMP then lets each waiting thread sleep at
    once, and waking it takes longer than most operations of a small model: training steps took 1.5 times as long.
    `torch.set_num_threads` would also limit a main thread that computes later, and so change the last bits of training.
    """
    import torch

    torch.get_num_threads()  # adopt torch's number now, or it would override the one set here
    with contextlib.suppress(OSError, AttributeError):  # without the limits a thread still does its work
        libraries = ctypes.CDLL(torch._C.__file__)  # those that torch is linked to
        libraries.omp_set_num_threads(1)
        # torch.set_num_threads sets MKL's number, too, apart from OpenMP's. The name in lower case is Fortran's.
        libraries.MKL_Set_Num_Threads_Local(1)


def _serve(pipe: "connection.Connection[object, Any]", target: object, memory_bytes: int) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends its workers
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are parallel already
    # Send tensors as arrays: torch would keep a shared-memory file open for each.
    ForkingPickler.register(torch.Tensor, _reduce_tensor)
    _limit_memory(memory_bytes)
    pipe.send("ready")
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = pipe.recv()
            try:
                reply = (True, methodcaller(method, *arguments)(target))
            except MemoryError:
                reply = (False, WorkerDied(f"it needs more than {memory_bytes:,} bytes of memory"))
            except Exception as error:
                reply = (False, error)
            send(pipe, reply)


def _reduce_tensor(tensor: "Tensor") -> "tuple[Callable[..., Tensor], tuple[object, ...]]":
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return _restore_tensor, (tensor.permute(order).contiguous().numpy(), order)


def _restore_tensor(array: "ndarray", order: list[int]) -> "Tensor":
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
