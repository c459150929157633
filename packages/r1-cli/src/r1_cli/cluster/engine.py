"""An engine in its own process: any `Generator` of r1-rollout, behind methods that the driver calls.

It knows nothing of Ray. One thread serves all calls, as each is short: a few prompts and groups, or one bucket of
weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from r1_cli.cluster.batch_transfer import to_tensor
from r1_cli.cluster.worker_group import Reference
from r1_cli.runs.processes import count_tokens
from r1_rollout.errors import EngineError
from r1_rollout.fault import Engine
from r1_rollout.lora import Adapter
from r1_rollout.pool.tasks import FinishedPart, Task
from r1_rollout.types import (
    Checksummed,
    Comparison,
    Expected,
    GenerationSession,
    Groups,
    Interactive,
    PromptLike,
    SamplingParams,
)
from r1_rollout.weights import DirectWeights, LocalWeights, TransferCall, WeightSource

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

BuildEngine = Callable[[ExitStack], Engine]  # makes the engine, which ends with the stack
TURN = 0.05  # seconds of sampling in a session before the engine looks for further groups


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """See `r1_rollout.types.Checksummed`."""

    precisions: tuple[str, ...]
    keeps_layout: bool


class EngineHost:
    """One engine and its pending work: weights being loaded, or prompts being sampled."""

    def __init__(self, build: BuildEngine) -> None:
        self._stack, self._active = ExitStack(), ExitStack()
        self._engine = build(self._stack)
        self._incoming: IncomingWeights | None = None
        self._params: SamplingParams | None = None
        self._numbers: list[int] = []  # of the prompts that the running call knows
        self._prompts: list[PromptLike] = []
        self._groups: Groups | None = None
        self._session: GenerationSession | None = None

    def describe(self) -> EngineInfo:
        engine = cast(Checksummed, self._engine)
        return EngineInfo(engine.precisions, engine.keeps_layout)

    # --- weights -----------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Prepare sampling from the loaded weights, until `offload`."""
        self._active.enter_context(self._engine.active())

    def begin_load(self, version: int, activate: bool, form: Adapter | None = None, direct: bool = False) -> None:
        """Begin to load weights, or with a `form` an adapter.

        Args:
            activate: also prepare sampling from them, until `offload`.
            direct: they arrive by a sender's calls, `make_call`, else by `load_bucket`.
        """
        self._incoming = IncomingWeights(partial(self._load, activate=activate), version, form, direct=direct)

    def _load(self, source: WeightSource, *, activate: bool) -> None:
        if activate:
            self._active.enter_context(self._engine.active(source))
        else:
            self._engine.load_weights(source)

    def load_bucket(self, bucket: Reference) -> None:
        """Load one bucket; returns when the engine has finished with it. Raises what the engine raises."""
        assert self._incoming is not None
        self._incoming.add(bucket)

    def make_call(self, call: TransferCall) -> None:
        """Apply a call of vLLM's weight transfer. Raises what the engine raises."""
        assert self._incoming is not None
        self._incoming.add(call)

    def end_load(self, whole: bool) -> None:
        """Finish loading. Raises what the engine raises, which is certain if not `whole`."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.end(whole)

    def offload(self) -> None:
        self.abandon()
        self._active.close()

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        return cast(Checksummed, self._engine).compare(expected)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def begin_sampling(self, params: SamplingParams, session: bool = False) -> None:
        """Begin a call to `generate`, or a session; unfinished groups are abandoned.

        Raises EngineError if the engine has no sessions.
        """
        self.abandon()
        self._params = params
        if session:
            if not isinstance(self._engine, Interactive):
                raise EngineError(f"{type(self._engine).__name__} has no open_session, which episodes need")
            self._session = self._engine.open_session(params)

    def work(self, tasks: Sequence[Task], cancelled: Sequence[int] = ()) -> list[FinishedPart]:
        """Add groups and sample until one is finished, or in a session for `TURN` seconds; return what is finished."""
        if self._session is not None:
            return self._work_in_session(self._session, tasks, cancelled)
        assert self._params is not None
        if self._groups is None:
            self._numbers, self._prompts = [], []
        self._numbers += [task.index for task in tasks]
        self._prompts += [task.prompt for task in tasks]
        if self._groups is None:
            self._groups = self._engine.generate(self._prompts, self._params)
        try:
            index, group = next(self._groups)
            count_tokens(sum(len(one.token_ids) for one in group))
        except StopIteration:
            self._groups = None
            return []
        return [(self._numbers[index], None, group)]

    def _work_in_session(
        self, session: GenerationSession, tasks: Sequence[Task], cancelled: Sequence[int]
    ) -> list[FinishedPart]:
        assert self._params is not None
        known = len(self._params.stop)  # strings that the session has already
        for index in cancelled:
            session.cancel(str(index))
        for task in tasks:
            if task.index not in cancelled:
                n, length, stop = task.params.n, task.params.max_tokens, task.params.stop[known:]
                session.submit(str(task.index), task.prompt, n=n, max_tokens=length, stop=stop, split=task.split)
        finished: list[FinishedPart] = []
        for key, completions in session.poll(TURN):
            name, _, number = key.partition("/")
            finished.append((int(name), int(number) if number else None, completions))
            count_tokens(sum(len(one.token_ids) for one in completions))
        return finished

    def prefilled(self) -> int | None:
        """See `GenerationSession.prefilled`."""
        return self._session.prefilled if self._session is not None else None

    def abandon(self) -> None:
        """Abandon unfinished groups, and drop prompts to free their pictures."""
        for call in (self._groups, self._session):
            if call is not None:
                call.close()
        self._groups, self._session, self._numbers, self._prompts = None, None, [], []

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]:
        return self._engine.logprobs_of(prompts, responses, temperature)

    def close(self) -> None:
        with suppress(Exception):  # what the engine raises of a load without its end
            self.end_load(whole=False)
        self.offload()
        self._stack.close()


class IncomingWeights:
    """Weights that an engine reads in a thread, from buckets or calls that are added one by one."""

    def __init__(
        self,
        load: Callable[[WeightSource], None],
        version: int,
        form: Adapter | None = None,
        *,
        direct: bool = False,
    ) -> None:
        self._items: SimpleQueue[Reference | TransferCall | Exception | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()  # one for each item that was read, and for the end
        self._error: BaseException | None = None
        self._over = False
        read = self._read if form is None else lambda: replace(form, weights=self._read())
        source = DirectWeights(self._calls, version) if direct else LocalWeights(read, version)
        self._thread = Thread(target=self._run, args=(load, source), daemon=True, name="r1-weights")
        self._thread.start()

    def _run(self, load: Callable[[WeightSource], None], source: WeightSource) -> None:
        try:
            load(source)
        except BaseException as error:  # raised by `add` or `end`
            self._error = error
        self._over = True
        self._done.put(None)

    def _added(self) -> Iterator[Any]:
        while (item := self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            del item
            self._done.put(None)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._added():
            yield from ((name, to_tensor(*packed)) for name, packed in bucket.load())
            del bucket

    def _calls(self) -> Iterator[TransferCall]:
        yield from self._added()

    def add(self, item: Reference | TransferCall) -> None:
        """Add an item; returns when the engine has finished with it. Raises what the engine has raised."""
        self._items.put(item)
        self._done.get()
        if self._over:
            self._thread.join()
            raise self._error or RuntimeError("the engine read no more weights, though more came")

    def end(self, whole: bool) -> None:
        """End the weights, complete if `whole`. Raises what the engine has raised."""
        self._items.put(None if whole else ConnectionError("the rest of the weights did not come"))
        self._thread.join()
        if self._error is not None:
            raise self._error
