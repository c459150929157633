"""One object in a subprocess of the driver, without Ray: a `WorkerGroup` of one.

Calls go through a pipe as pickles. The process ends with the driver, however that ends, and ignores signals: the driver
may still need the result of a pending call.
"""

import logging
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

from r1_cli.cluster.worker_group import ClusterError, picklable_error, redirect_output, tail_log
from r1_cli.faults.stacks import answer_requests
from r1_cli.runs.processes import note, record_process

ENDING = 10.0  # seconds until a process that has closed its pipe has ended


@dataclass(frozen=True, slots=True)
class Carried:
    value: Any

    def load(self) -> Any:
        return self.value


class OwnProcess:
    """A process with one object. Any thread may call it, one call at a time."""

    def __init__(self, name: str, log: Path, threads: int) -> None:
        """Start the process without waiting. `threads` are for torch; its output goes to the log."""
        self.name, self._log = name, log
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._turn = Lock()
        # No child of Python's own kind is left behind when the driver ends.
        self._process = context.Process(target=_serve, args=(theirs, name, log, threads), name=name, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def preload(self, *modules: str) -> None:
        self._pipe.send_bytes(pickle.dumps(("preload", modules)))

    def create(self, maker: Callable[..., object], *args: object) -> None:
        self._call("create", (maker, args))

    def call(self, verb: str, *args: object, **kwargs: object) -> Any:
        """Call a method of its object; return the result.

        Raises:
            ClusterError: the process has died.
            Exception: what the method has raised, with a note that names the process.
        """
        return self._call("call", (verb, args, kwargs))

    def call_all(self, verb: str, *args: object, **kwargs: object) -> list[Any]:
        return [self.call(verb, *args, **kwargs)]

    def put(self, value: object) -> Carried:
        return Carried(value)

    @property
    def remote_put(self) -> Callable[[object], Carried]:
        return Carried

    @property
    def remote_caller(self) -> Callable[..., Any]:
        """Raise NotImplementedError: only the driver has the pipe."""
        raise NotImplementedError(f"{self.name} is called by the driver alone")

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _call(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        what = arguments[0] if kind == "call" else "start"
        with self._turn:
            try:
                self._pipe.send_bytes(pickle.dumps((kind, arguments), protocol=5))
                good, answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError) as error:
                self._process.join(ENDING)
                raise ClusterError(
                    f"{self.name}, process {self.pid}, died in {what} (exit code {self._process.exitcode})\n"
                    f"  its log, {self._log}, ends with\n{tail_log(self._log)}"
                ) from error
        if not good:
            answer.add_note(f"raised by {self.name} in {what}, see its log {self._log}")
            raise answer
        return answer


def _serve(pipe: "Connection[Any, Any]", name: str, log: Path, threads: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    redirect_output(log)
    record_process(log.parents[1], name)
    print(f"--- {name}, process {os.getpid()}, {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    answer_requests()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # which are no news in a log
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    if "torch" in sys.modules:  # as it is where the run is started by a script that imports it
        sys.modules["torch"].set_num_threads(threads)
    held: Any = None
    with suppress(EOFError, OSError):
        while True:
            kind, sent = pickle.loads(pipe.recv_bytes())
            if kind == "preload":
                with suppress(Exception):  # raised again where the module is needed
                    for module in sent:
                        import_module(module)
                continue
            try:
                answer = None
                note("start" if kind == "create" else sent[0])
                if kind == "create":
                    held = sent[0](*sent[1])
                else:
                    answer = getattr(held, sent[0])(*sent[1], **sent[2])
                reply = True, answer
            except BaseException as error:
                traceback.print_exc()
                reply = False, picklable_error(error)
            note("")
            pipe.send_bytes(pickle.dumps(reply, protocol=5))
    os._exit(0)
