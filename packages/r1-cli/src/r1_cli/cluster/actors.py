"""Groups of Ray actors: started by name on their nodes, called together, and ended by the first error."""

import gc
import itertools
import logging
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock
from typing import Any, ClassVar

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from r1_cli.cluster.kept_actors import KeptActors, RunningActor
from r1_cli.cluster.worker_group import ClusterError, picklable_error, redirect_output, tail_log
from r1_cli.config.problems import SECRET
from r1_cli.faults.stacks import answer_requests
from r1_cli.placement import ActorPlacement, threads_per_rank
from r1_cli.runs.processes import note, record_process

log = logging.getLogger("r1")

START_SECONDS = 600.0  # seconds for an actor's process to start
START_ATTEMPTS = 2  # to start a group before the run ends
STARTED = itertools.count()  # actors of this process, for names that no other has
DEATH_SECONDS = 10.0  # seconds after a first error in which Ray may report the death that caused it
# Variables of the driver's environment that every actor gets; secrets are not passed on.
PASSED_ON = ("CUBLAS_", "GLOO_", "GOMP_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TRANSFORMERS_", "VLLM_")


class ActorProcess:
    place: ClassVar[str] = "the driver"  # which process this is
    held: Any = None
    recording: Event | None = None  # ends the process's record
    made: bytes | None = None  # the request that made `held`, if it can be kept

    def begin(self, place: ActorPlacement, folder: str, environment: Mapping[str, str]) -> int:
        redirect_output(place.log)
        if self.recording is not None:
            self.recording.set()
        self.recording = record_process(place.log.parents[1], place.name)
        ActorProcess.place = str(place)
        print(f"--- {place}, process {os.getpid()}, {datetime.now():%Y-%m-%d %H:%M:%S}", flush=True)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        answer_requests()
        os.chdir(folder)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would fill the log
        # Read when torch is imported, which happens later.
        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(len(os.sched_getaffinity(0)), place.sharing))
        os.environ.update(environment)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.devices)
        if place.node.scratch:
            os.environ["TMPDIR"], tempfile.tempdir = place.node.scratch, None  # removed even if the process is killed
        return os.getpid()

    def preload(self, modules: Sequence[str]) -> None:
        with suppress(Exception):
            for module in modules:
                import_module(module)

    def create(self, maker: Callable[..., object], *args: object) -> None:
        """Make the actor's object; keep the one that is there if it was made by an equal request and has `reset`."""
        made = None
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            made = pickle.dumps((maker, args)) if hasattr(maker, "reset") else None
        if made is None or made != self.made:
            self._drop()
            self.held, self.made = _call(maker, args, {}), made

    def reset(self) -> None:
        """Leave what this actor does, as the run starts again without having ended this process."""
        if self.made is None:
            self._drop()
        else:
            _call(self.held.reset, (), {})

    def _drop(self) -> None:
        held, self.held, self.made = self.held, None, None
        if hasattr(held, "close"):
            _call(held.close, (), {})
        if held is not None:
            del held
            gc.collect()

    def call(self, wanted: bool, verb: str, *args: object) -> object:
        note(".".join([verb, *map(str, args[:2])]) if verb == "call" else verb)  # of a rank: model and method
        try:
            answer = _call(getattr(self.held, verb), args, {})
        finally:
            note("")
        return answer if wanted else None


def _call(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        raise picklable_error(error) from None


@dataclass(frozen=True, slots=True)
class RayReference:
    reference: Any
    owner: str  # the process that stored it; the value is lost with it

    def load(self) -> Any:
        """Return the value. Its arrays are read-only: other processes share their memory.

        Raises ClusterError if the value is lost with its owner.
        """
        try:
            return ray.get(self.reference)
        except ObjectLostError as error:
            raise ClusterError(f"{self.owner} is gone, and with it what was to be read here") from error


def put(value: object) -> RayReference:
    """Store a value once per node, where actors read it in place, while a reference to it exists."""
    return RayReference(ray.put(value), ActorProcess.place)


class ActorGroup:
    """Actors that work together: the first failed call ends all of them."""

    def __init__(
        self,
        places: Sequence[ActorPlacement],
        calls: int = 1,
        patience: float | None = None,
        kept: KeptActors | None = None,
    ) -> None:
        """Start a process for each placement.

        Args:
            calls: concurrent calls of an actor.
            patience: seconds after the first actor's return until others count as hung; None: no limit.
            kept: actors that the run has had, which are used again, and where these go when the group is closed.

        Raises:
            ClusterError: an actor does not start within `START_SECONDS`, dies in both attempts, or does not see this
                folder or the logs'.
        """
        self.places, self._calls, self._patience, self.kept = tuple(places), calls, patience, kept
        self._turn = Lock()  # calls must reach all actors in the same order
        self._end: BaseException | None = None  # why the group has ended
        self._closed = False
        self._parts: list[ActorGroup] = []  # as `split` has made them
        self._handles: list[Any] = []
        self.pids: list[int] = []
        try:
            self.pids = self._start()
        except OSError as error:
            where = f"{os.getcwd()}, where the command was typed, and {self.places[0].log.parent}"
            told = "; ".join([str(error), *vars(error).get("__notes__", ())])
            raise ClusterError(f"every machine must see {where}: {told}") from error

    def _start(self) -> list[int]:
        """Start the processes; retry once, as Ray may lose one on a loaded machine."""
        for attempt in range(START_ATTEMPTS):
            try:
                return self._begin()
            except ClusterError as error:
                self._kill()
                if attempt == START_ATTEMPTS - 1:
                    raise
                log.warning("%s. Starting it again", error)
                self._end, self._closed = None, False
            except BaseException:
                self._kill()
                raise
        raise AssertionError("unreachable")

    def _begin(self) -> list[int]:
        environment = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON) and not SECRET.search(k)}
        again = self.kept.take(self.places) if self.kept else [None] * len(self.places)
        self._handles = [
            one.handle if one else self._launch(place) for one, place in zip(again, self.places, strict=True)
        ]
        starts = zip(self._handles, self.places, strict=True)
        begun = [one.begin.remote(place, os.getcwd(), environment) for one, place in starts]
        return self._collect(begun, "start", START_SECONDS)

    def _launch(self, place: ActorPlacement) -> Any:
        return (
            ray.remote(max_restarts=0, num_cpus=0)(type(place.name, (ActorProcess,), {}))
            .options(
                name=f"{place.name}-{next(STARTED)}",  # Ray frees the name of a dead actor only after a while
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node.id, soft=False),
                max_concurrency=self._calls,
            )
            .remote()
        )

    def preload(self, *modules: str) -> None:
        for one in self._handles:
            one.preload.remote(modules)

    def create(self, maker: Callable[..., object], each: Sequence[tuple[object, ...]]) -> None:
        """Make each actor's object, by `maker` with its own arguments. Raises as `call_all` does."""
        with self._turn:
            calls = [one.create.remote(maker, *own) for one, own in zip(self._handles, each, strict=True)]
        self._collect(calls, "start")

    def call(self, verb: str, *args: object, label: str = "") -> Any:
        return self._call([index == 0 for index in range(len(self.places))], verb, args, label)[0]

    def call_all(self, verb: str, *args: object, label: str = "") -> list[Any]:
        """Call a method of each actor's object; return all results.

        If some fail and others do not return, all are ended: their collective will not complete.

        Raises:
            ClusterError: an actor has died.
            Exception: what the method has raised, with a note that names the actor and its log.
        """
        return self._call([True] * len(self.places), verb, args, label)

    def call_first(self, verb: str, *args: object) -> Any:
        return self._collect([self._handles[0].call.remote(True, verb, *args)], verb)[0]

    def put(self, value: object) -> "RayReference":
        return put(value)

    def split(self) -> "list[ActorGroup]":
        """Return a group per actor: an error ends only its own."""
        self._parts = [self._alone(index) for index in range(len(self.places))]
        return self._parts

    def _alone(self, index: int) -> "ActorGroup":
        one = copy(self)
        one.places, one.pids, one._parts = (self.places[index],), [self.pids[index]], []
        one._handles, one._turn = [self._handles[index]], Lock()
        return one

    @property
    def remote_put(self) -> Callable[[object], "RayReference"]:
        return put

    @property
    def remote_caller(self) -> "ActorCaller":
        return ActorCaller(self.places[0], self._handles[0])

    def close(self) -> None:
        """End the actors, or give them to `kept`; no call of this group reaches them any more."""
        if self.kept is None:
            self._kill()
        elif not self._closed:
            for one in (self, *self._parts):
                one._closed = True
            self.kept.add(self._actors())

    def _kill(self) -> None:
        for one in self._actors():
            one.kill()

    def _actors(self) -> list[RunningActor]:
        pids: Sequence[int | None] = self.pids or [None] * len(self._handles)
        return [RunningActor(*one) for one in zip(self.places, self._handles, pids, strict=True)]

    def _call(self, wanted: list[bool], verb: str, args: tuple[object, ...], label: str) -> list[Any]:
        label = label or verb
        if self._end:
            raise ClusterError(f"{self.places[0].name} and those beside it have ended: {self._end}") from self._end
        if self._closed:
            raise RuntimeError(f"{self.places[0].name} belongs to a later start of the run")
        with self._turn:
            calls = [
                one.call.options(name=f"{place.name}.{label}").remote(w, verb, *args)  # the timeline's name
                for one, place, w in zip(self._handles, self.places, wanted, strict=True)
            ]
        return self._collect(calls, label)

    def _collect(self, calls: list[Any], verb: str, timeout: float | None = None) -> list[Any]:
        """Wait for all results, or for the first error and a death soon after.

        A signal handler's exception interrupts this wait for a queue; Ray's own would swallow it. Each result enters
        the queue once: to wait for the first of N futures, N times over, would touch N² of them.
        """
        done: SimpleQueue[int] = SimpleQueue()
        waiting = {index: call.future() for index, call in enumerate(calls)}
        for index, future in waiting.items():
            future.add_done_callback(partial(_enqueue, done, index))
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        died = False
        while waiting and not died:
            try:
                index = done.get(timeout=DEATH_SECONDS if errors else self._patience if answers else timeout)
            except Empty:
                break
            future = waiting.pop(index)
            if (error := future.exception()) is None:
                answers[index] = future.result()
            else:
                errors[index], died = error, isinstance(error, RayActorError)
        if len(answers) == len(calls):
            return [answers[index] for index in range(len(calls))]
        error = self._explain(verb, errors, [self.places[index].name for index in waiting])
        if waiting or isinstance(error, ClusterError):
            self._end = error
            self.close()
        raise error

    def _explain(self, verb: str, errors: Mapping[int, BaseException], silent: Sequence[str]) -> BaseException:
        """Return the error to raise: a death, which may have caused the others, else the first."""
        if not errors:
            return self._explain_silence(verb, silent)
        deaths = {index: error for index, error in errors.items() if isinstance(error, RayActorError)}
        found = deaths or errors
        index = next(iter(found)) if silent else min(found)  # if all have it, report the first actor's
        error, place = found[index], self.places[index]
        if deaths:
            last = tail_log(place.log)
            return ClusterError(
                f"{place} died in {verb}: {reason_of(error)}\n  its log, {place.log}, ends with\n{last}"
            )
        others = f"; it ended {', '.join(silent)}" if silent else ""
        if not isinstance(error, RayTaskError):  # Ray's own error, not in the log
            return ClusterError(f"{place} failed in {verb}: {type(error).__name__}: {error}{others}")
        error.cause.add_note(
            f"raised by {place} in {verb}, see its log {place.log}{others}{_unlogged(error, place.log)}"
        )
        return error.cause

    def _explain_silence(self, verb: str, silent: Sequence[str]) -> ClusterError:
        names = ", ".join(silent)
        if len(silent) == len(self.places):
            return ClusterError(f"{names} did not {verb} in time; see {self.places[0].log.parent}")
        return ClusterError(
            f"{names} did not answer {verb} within {self._patience:g} seconds of the others: hung or stopped. Its log "
            f"is in {self.places[0].log.parent}; trainer.collective_timeout sets how long to wait"
        )


def _enqueue(done: SimpleQueue[int], index: int, future: object) -> None:
    done.put(index)


@dataclass(frozen=True, slots=True)
class ActorCaller:
    place: ActorPlacement
    handle: Any

    def __call__(self, verb: str, *args: object) -> object:
        """Return the result. Raises what the method has raised, or ClusterError if the actor has died."""
        try:
            return ray.get(self.handle.call.remote(True, verb, *args))
        except RayActorError as error:
            raise ClusterError(f"{self.place} died in {verb}: {reason_of(error)}") from error
        except RayTaskError as error:
            error.cause.add_note(f"raised by {self.place} in {verb}, see its log {self.place.log}")
            raise error.cause from error


def _unlogged(error: RayTaskError, log: Path) -> str:
    """Return the end of an error's traceback if the log lacks it: Ray raised it before the method ran."""
    if type(error.cause).__name__ in tail_log(log, 50):
        return ""
    return "".join(f"\n    {line}" for line in str(error).strip().splitlines()[-5:])


def reason_of(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()[1:] if line and not line.startswith("\t")]
    return " ".join(lines).partition(" If the process was killed")[0] or str(error)
