"""An engine in a process of its own: any `Generator` of r1-rollout, behind verbs that a driver elsewhere calls.

Knows nothing of Ray. Every verb ends by itself, so that one thread is enough to serve them: prompts come and groups go
a few at a time, and weights a bucket at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from r1_cli.cluster.batch import Reference, to_tensor
from r1_rollout.checksums import Comparison, Expected
from r1_rollout.fault import Engine
from r1_rollout.lora import Adapter
from r1_rollout.types import Checksummed, Completion, Groups, PromptLike, SamplingParams
from r1_rollout.weight_source import DirectWeights, LocalWeights, TransferCall, WeightSource

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

BuildEngine = Callable[[ExitStack], Engine]  # makes the engine, which ends with the stack
Numbered = tuple[int, list[Completion]]  # a group by the number that its prompt was sent with


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a driver has to know of an engine; see `r1_rollout.types.Checksummed`."""

    precisions: tuple[str, ...]
    keeps_layout: bool


class EngineHost:
    """One engine, and what is under way in it: weights that come, or prompts that are sampled."""

    def __init__(self, build: BuildEngine) -> None:
        self._stack, self._active = ExitStack(), ExitStack()
        self._engine = build(self._stack)
        self._arrival: Arrival | None = None
        self._params: SamplingParams | None = None
        self._numbers: list[int] = []  # of the prompts that the running call knows
        self._prompts: list[PromptLike] = []
        self._groups: Groups | None = None

    def describe(self) -> EngineFacts:
        """Return what the engine says of itself."""
        engine = cast(Checksummed, self._engine)
        return EngineFacts(engine.precisions, engine.keeps_layout)

    # --- weights -----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Get ready to sample from the weights that are there, until `rest`."""
        self._active.enter_context(self._engine.active())

    def expect(self, version: int, wake: bool, form: Adapter | None = None, delivered: bool = False) -> None:
        """Begin to take up weights, or with a `form` an adapter; with `wake`, sample from them, too, until `rest`.

        They come by `take`, or if they are to be `delivered`, as a sender's calls.
        """
        self._arrival = Arrival(partial(self._take_up, wake=wake), version, form, delivered=delivered)

    def _take_up(self, source: WeightSource, *, wake: bool) -> None:
        if wake:
            self._active.enter_context(self._engine.active(source))
        else:
            self._engine.load_weights(source)

    def take(self, bucket: Reference) -> None:
        """Take up one bucket; when this returns the engine has done with it. Raises what the engine raises."""
        assert self._arrival is not None
        self._arrival.take(bucket)

    def deliver(self, call: TransferCall) -> None:
        """Make a sender's call. Raises what the engine raises."""
        assert self._arrival is not None
        self._arrival.take(call)

    def finish(self, whole: bool) -> None:
        """End what `expect` has begun. Raises what the engine raises, which is sure to happen if not `whole`."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.finish(whole)

    def rest(self) -> None:
        """Let go of what sampling takes."""
        self.abandon()
        self._active.close()

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        """Do what the engine's does."""
        return cast(Checksummed, self._engine).compare(expected)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def begin(self, params: SamplingParams) -> None:
        """Sample so from now on, in the place of what was under way."""
        self.abandon()
        self._params = params

    def work(self, prompts: Sequence[tuple[int, PromptLike]]) -> list[Numbered]:
        """Take up prompts, and sample until one more group is finished; return it, or nothing if there is none."""
        assert self._params is not None
        if self._groups is None:
            self._numbers, self._prompts = [], []
        self._numbers += [number for number, _ in prompts]
        self._prompts += [prompt for _, prompt in prompts]
        if self._groups is None:
            self._groups = self._engine.generate(self._prompts, self._params)
        try:
            index, group = next(self._groups)
        except StopIteration:
            self._groups = None
            return []
        return [(self._numbers[index], group)]

    def abandon(self) -> None:
        """Give up what is unfinished, and let go of the prompts: pictures lie in memory while somebody holds them."""
        if self._groups is not None:
            self._groups.close()
        self._groups, self._numbers, self._prompts = None, [], []

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> list[list[float]]:
        """Do what the engine's does."""
        return self._engine.logprobs_of(prompts, responses, temperature)

    def close(self) -> None:
        """End the engine."""
        self._stack.close()


class Arrival:
    """Weights that an engine reads, in a thread, as a source of which one bucket or call after the other is brought."""

    def __init__(
        self,
        take_up: Callable[[WeightSource], None],
        version: int,
        form: Adapter | None = None,
        *,
        delivered: bool = False,
    ) -> None:
        self._brought: SimpleQueue[Reference | TransferCall | Exception | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()  # a word for each bucket that was read, and for the end
        self._error: BaseException | None = None
        self._over = False
        read = self._read if form is None else lambda: replace(form, weights=self._read())
        source = DirectWeights(self._calls, version) if delivered else LocalWeights(read, version)
        self._thread = Thread(target=self._run, args=(take_up, source), daemon=True, name="r1-weights")
        self._thread.start()

    def _run(self, take_up: Callable[[WeightSource], None], source: WeightSource) -> None:
        try:
            take_up(source)
        except BaseException as error:  # raised by `take` or `finish`
            self._error = error
        self._over = True
        self._done.put(None)

    def _items(self) -> Iterator[Any]:
        """Yield what is brought, and tell when the next one is asked for."""
        while (brought := self._brought.get()) is not None:
            if isinstance(brought, Exception):
                raise brought
            yield brought
            del brought
            self._done.put(None)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._items():
            yield from ((name, to_tensor(*packed)) for name, packed in bucket.load())
            del bucket

    def _calls(self) -> Iterator[TransferCall]:
        yield from self._items()

    def take(self, item: Reference | TransferCall) -> None:
        """Bring one; returns when the engine has done with it. Raises what the engine has raised."""
        self._brought.put(item)
        self._done.get()
        if self._over:
            self._thread.join()
            raise self._error or RuntimeError("the engine took no more weights, though more came")

    def finish(self, whole: bool) -> None:
        """Bring the end, or the news that the rest will not come. Raises what the engine has raised."""
        self._brought.put(None if whole else ConnectionError("the rest of the weights did not come"))
        self._thread.join()
        if self._error is not None:
            raise self._error
