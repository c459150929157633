"""A pool of engines in other processes: actors of a cluster, or a subprocess of the driver."""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from r1_cli.cluster.batch_transfer import put_inputs
from r1_cli.cluster.direct import Ask, DirectBackend
from r1_cli.cluster.engine import EngineInfo
from r1_cli.cluster.weights import RankedWeights, put_buckets
from r1_cli.cluster.worker_group import ClusterError, Put, Reference, WorkerGroup
from r1_rollout.pool.dispatch import Dispatch, Fleet, Member
from r1_rollout.pool.pool import EnginePool
from r1_rollout.pool.tasks import Backlog, FinishedPart, MemberLost, Task
from r1_rollout.types import Comparison, Completion, Expected, PromptLike, SamplingParams
from r1_rollout.weights import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

    from r1_rollout.types import Tokens

log = logging.getLogger("r1")

Start = Callable[[int], WorkerGroup]  # starts the engine of a place in the pool
CALLS = 2  # calls of `work` in flight to an engine, so that the next is there when one ends


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """A prompt with media as a reference."""

    id: str
    token_ids: Sequence[int]
    position_ids: "Tensor"  # int64 [axes, prompt_length]
    model_inputs: "Mapping[str, Tensor]"


class RemoteEngine:
    """An engine in another process, as a member of a pool; `ranks` is the process with its `EngineHost`."""

    reserve = 2  # groups beyond those that fit, so that it never waits for the driver

    def __init__(self, name: str, ranks: WorkerGroup) -> None:
        self.name, self.ranks = name, ranks
        self.backlog = Backlog()
        self.lost: MemberLost | None = None  # why its process does not answer any more

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host. Raises MemberLost if its process has died, and the engine's errors."""
        try:
            return self.ranks.call(method, *arguments)
        except ClusterError as error:
            self.lost = MemberLost(str(error))
            raise self.lost from error

    @property
    def remote_caller(self) -> Ask:
        return self.ranks.remote_caller

    def open(self, params: SamplingParams, dispatch: Dispatch) -> "RemoteSession":
        self.call("begin_sampling", params, dispatch.session)
        return RemoteSession(self, dispatch)

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]:
        found: list[list[float]] = self.call("logprobs_of", prompts, list(responses), temperature)
        return found

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        found: Comparison = self.call("compare", dict(expected))
        return found


class EngineFleet(Fleet):
    """The engines of a pool, which goes on without those whose processes have died.

    Their unfinished groups go to the others: the noise of a sample does not depend on the engine. A lost engine is
    started again in a thread, and takes part from the next weight sync.
    """

    def __init__(self, engines: "Sequence[RemoteEngine]", start: "Start | None") -> None:
        super().__init__(engines)
        self.engines = tuple(engines)
        self._start, self._threads = start, ThreadPoolExecutor(1, "r1-engine-start")
        self._pending: dict[int, Future[WorkerGroup]] = {}  # by the engine's place

    def ready(self) -> "Sequence[RemoteEngine]":
        return [engine for engine in self.engines if engine.lost is None]

    def usable(self) -> "Sequence[RemoteEngine]":
        return self.ready()

    def retries(self, member: Member, error: BaseException) -> bool:
        if not isinstance(error, MemberLost):
            return False
        with self.changed:
            self.broken = not self.ready()
            self.members = tuple(self.ready())
            self._begin_starts(error)
        return not self.broken

    def _begin_starts(self, error: BaseException) -> None:
        for place, engine in enumerate(self.engines):
            if engine.lost is None or place in self._pending or self.broken:
                continue
            again = "" if self._start is None else ", until it has started again"
            log.warning("%s\nThe step goes on with the other engines%s", error, again)
            start = self._start or _never
            self._pending[place] = self._threads.submit(start, place)

    def admit(self) -> None:
        """Let the engines take part that have started again. Those that could not stay lost."""
        for place, start in [*self._pending.items()]:
            if not start.done() or self._start is None:
                continue
            if (error := start.exception()) is not None:
                log.warning("%s could not be started again: %s", self.engines[place].name, error)
                self._start = None
                continue
            engine = self.engines[place]
            engine.ranks, engine.lost, engine.backlog = start.result(), None, Backlog()
            del self._pending[place]
            log.info("%s takes part again", engine.name)
        self.members = tuple(self.ready())


def _never(place: int) -> WorkerGroup:
    raise ClusterError("nothing starts engines of this pool again")


class RemoteSession:
    """One call on one engine. Threads here call `EngineHost.work` repeatedly."""

    def __init__(self, member: RemoteEngine, dispatch: Dispatch) -> None:
        self._member, self._dispatch = member, dispatch
        self._changed = threading.Condition()
        self._inbox: list[Task] = []  # that are to be sent
        self._cancelled: list[int] = []  # tasks whose engine is to be told
        self._unfinished: dict[int, int] = {}  # results of each task that are to come
        self._calls = 0  # in flight
        self._closed = False
        self._error: BaseException | None = None  # why it has ended
        self._threads = [
            threading.Thread(target=self._serve, daemon=True, name=f"r1-{member.name}") for _ in range(CALLS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def prefilled(self) -> int | None:
        try:
            found: int | None = self._member.call("prefilled")
        except MemberLost:
            return None
        return found

    def submit(self, tasks: Sequence[Task]) -> None:
        with self._changed:
            if self._error is not None:
                error, refused = self._error, [task.index for task in tasks]
            else:
                refused = []
                self._add(tasks)
        for index in refused:
            self._dispatch.finish(index, error)

    def _add(self, tasks: Sequence[Task]) -> None:
        with self._changed:
            self._inbox += tasks
            self._unfinished |= {task.index: task.params.n if task.split else 1 for task in tasks}
            self._changed.notify_all()

    def cancel(self, index: int) -> None:
        with self._changed:
            if index not in self._unfinished:
                return
            del self._unfinished[index]
            self._cancelled.append(index)
            self._changed.notify_all()
        self._dispatch.finish(index, [])

    def close(self, *, wait: bool) -> Iterable[int]:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads if wait else ():
            if thread is not threading.current_thread():
                thread.join()
        with self._changed:
            left, self._unfinished = list(self._unfinished), {}
            return left

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            finished: list[FinishedPart] = []
            try:
                finished = self._member.call("work", *work)
            except BaseException as error:  # a thread's error must reach the consumer
                self._fail(error)
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()
            for index, number, completions in finished:
                self._report(index, number, completions)

    def _fail(self, error: BaseException) -> None:
        """Give the unfinished groups back with the error."""
        with self._changed:
            self._error, self._closed = error, True
            left, self._unfinished = list(self._unfinished), {}
            self._changed.notify_all()
        for index in left:
            self._dispatch.finish(index, error)
        if not left:
            self._dispatch.fail(self._member, error)

    def _report(self, index: int, number: int | None, completions: "list[Completion]") -> None:
        """Report a group, or a sample and perhaps with it the end of its group. The other thread reports, too."""
        if number is not None:
            self._dispatch.deliver(index, number, completions[0])
        with self._changed:
            if index not in self._unfinished:  # it was cancelled
                return
            self._unfinished[index] -= 1
            if self._unfinished[index]:
                return
            del self._unfinished[index]
            self._changed.notify_all()
        self._dispatch.finish(index, completions if number is None else [])

    def _next(self) -> tuple[list[Task], list[int]] | None:
        """Wait until the engine is due; return the tasks and the cancellations to send, None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._inbox or self._cancelled or self._calls < len(self._unfinished)
            )
            if self._closed:
                return None
            work = self._inbox, self._cancelled
            self._inbox, self._cancelled = [], []
            self._calls += 1
            return work


class RemoteEnginePool(EnginePool[RemoteEngine]):
    """The pool of a run's engines in other processes. It goes on without dead ones; an error ends the call."""

    def __init__(
        self,
        members: Sequence[tuple[str, WorkerGroup]],
        *,
        max_sequences: int,
        dtype: torch.dtype | None,
        direct: DirectBackend | None = None,
        start: "Start | None" = None,
    ) -> None:
        """Store the engines.

        Args:
            members: a name for each, and the process with its `EngineHost`.
            max_sequences: samples that decode concurrently in each.
            dtype: of the sent weights; None: unchanged.
            direct: how ranks send full weights to the engines directly; None: through the object store.
            start: starts the engine of a place among `members` again, when its process has died; None: it stays lost.
        """
        if not members:
            raise ValueError("a pool of engines needs at least one")
        engines = [RemoteEngine(name, ranks) for name, ranks in members]
        self._dtype, self._direct = dtype, direct
        self._put: Put = engines[0].ranks.put
        infos: list[EngineInfo] = [engine.call("describe") for engine in engines]
        self._engines = EngineFleet(engines, start)
        super().__init__(
            self._engines,
            max_sequences=max_sequences,
            precisions=sorted({one for info in infos for one in info.precisions}),
            keeps_layout=all(info.keeps_layout for info in infos),
            max_attempts=max(2, len(engines)),
        )

    def _sync(self, source: WeightSource, *, activate: bool) -> None:
        """Send weights to all engines. If one dies meanwhile, send them to the others from the beginning."""
        self._engines.admit()
        while True:
            try:
                self._send(source, activate=activate)
            except MemberLost as error:
                if self._direct is not None or not self._engines.retries(self._engines.engines[0], error):
                    raise
                self._offload()  # of those that are active with them already
            else:
                return

    def _send(self, source: WeightSource, *, activate: bool) -> None:
        if self._direct is not None and isinstance(source, RankedWeights) and source.form is None:
            RankTransport(self._direct, self._dtype, activate).send(source, self._ready())
        else:
            ObjectTransport(self._put, self._dtype, activate).send(source, self._ready())

    def _activate(self) -> None:
        self._each(lambda engine: engine.call("activate"), self._ready())

    def _offload(self) -> None:
        self._each(lambda engine: engine.call("offload"), self._engines.ready())

    def _ready(self) -> Sequence[RemoteEngine]:
        """Return the living engines. Raises MemberLost if none is left, so that the run starts again."""
        ready = super()._ready()
        if not ready and (lost := self._engines.engines[0].lost) is not None:
            raise lost
        return ready

    def _prepare(self, prompts: Sequence[PromptLike]) -> Sequence[PromptLike]:
        return [
            SentPrompt(
                prompt.id,
                prompt.token_ids,
                prompt.position_ids,
                put_inputs(prompt.model_inputs, self._put) if prompt.model_inputs else {},
            )
            for prompt in prompts
        ]


@dataclass(frozen=True, slots=True)
class ObjectTransport:
    """Stores each bucket once for all engines: in the cluster's store, or through a pipe."""

    put: Put
    dtype: torch.dtype | None  # what weights are cast to before they are sent; None: they stay as they are
    activate: bool  # whether the engines make room to sample from them

    def send(self, source: WeightSource, members: Sequence[RemoteEngine]) -> Sequence[Exception | None]:
        form, parts = put_buckets(source, self.dtype, self.put)
        with loading(members, source.version, self.activate, form):
            self._send_buckets(parts, members)
        return [None] * len(members)

    def _send_buckets(self, parts: Iterator[Reference], members: Sequence[RemoteEngine]) -> None:
        """Send each bucket to all engines while the next is made; at most two are alive."""
        with ExitStack() as ending, ThreadPoolExecutor(1) as ahead:
            if isinstance(parts, Generator):
                ending.callback(parts.close)  # ranks that gather for it have to end their pass
            sending = None
            for bucket in parts:
                if sending is not None:
                    sending.result()
                sending = ahead.submit(call_all, members, "load_bucket", bucket)
                del bucket
            if sending is not None:
                sending.result()


@dataclass(frozen=True, slots=True)
class RankTransport:
    backend: DirectBackend
    dtype: torch.dtype | None
    activate: bool

    def send(self, source: WeightSource, members: Sequence[RemoteEngine]) -> Sequence[Exception | None]:
        assert isinstance(source, RankedWeights)
        with loading(members, source.version, self.activate, None, True):
            source.send(self.backend, [member.remote_caller for member in members], self.dtype)
        return [None] * len(members)


@contextmanager
def loading(members: Sequence[RemoteEngine], *expected: Any) -> Iterator[None]:
    """Begin to load weights in all engines, as `EngineHost.begin_load`, and end the load with the block."""
    call_all(members, "begin_load", *expected)
    whole = False
    try:
        yield
        whole = True
    finally:
        if not whole:
            call_all(members, "end_load", False, quiet=True)
    call_all(members, "end_load", True)


def call_all(members: Sequence[RemoteEngine], method: str, *arguments: Any, quiet: bool = False) -> list[Any]:
    """Call all engines concurrently; return all results. Raises the first error."""
    with ThreadPoolExecutor(len(members)) as threads:
        calls = [threads.submit(member.call, method, *arguments) for member in members]
    if quiet and any(one.exception() for one in calls):
        return []
    return [one.result() for one in calls]
