"""Several engines as one, for the driver: each is kept full, takes the weights, and is asked for proof of them."""

import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from r1_cli.cluster.batch import Put, Reference, put_inputs
from r1_cli.cluster.delivery import Way
from r1_cli.cluster.engine import EngineFacts, Numbered
from r1_cli.cluster.errors import ClusterError
from r1_cli.cluster.ranks import Ranks
from r1_cli.cluster.weights import RankedWeights, put_down
from r1_rollout.canary import TOLERANCE, widest_gap
from r1_rollout.checksums import Comparison, Expected, merged
from r1_rollout.errors import EngineError
from r1_rollout.types import PromptLike, SamplingParams
from r1_rollout.weight_source import WeightSource

if TYPE_CHECKING:
    from torch import Tensor

    from r1_rollout.types import Tokens

RESERVE = 2  # groups that an engine has beyond those that it has room for, lest it wait for the driver
CALLS = 2  # calls of `work` under way to an engine, so that the next is there when one ends


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """What an engine reads of a prompt, as it crosses: media as a reference."""

    id: str
    token_ids: Sequence[int]
    position_ids: "Tensor"  # int64 [axes, prompt_length]
    model_inputs: "Mapping[str, Tensor]"


@dataclass(eq=False, slots=True)
class Member:
    """One engine, and what it owes in the present call."""

    name: str  # for messages
    ranks: Ranks  # that one process which holds its `EngineHost`
    owed: int = 0  # tokens of groups that are unfinished, prompts and answers at their longest
    inbox: list[int] = field(default_factory=list)  # prompts that are to be sent
    unfinished: set[int] = field(default_factory=set)
    calls: int = 0  # under way


class EngineSet:
    """A `Generator`, `Replaying` and `Checksummed` over engines elsewhere that are all alike.

    A sample depends on its prompt, its number and the seed, so it does not matter which engine draws it; a group is
    drawn by one. It is not `Drainable`: what has begun by some moment depends on the clock. An engine that fails or
    dies ends the call, with its name: what the others have is of no use without it.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, Ranks]],
        *,
        max_sequences: int,
        dtype: torch.dtype | None,
        way: Way | None = None,
    ) -> None:
        """Take engines that have been made.

        Args:
            members: a name for each, and what asks its `EngineHost`.
            max_sequences: samples that decode at the same time in each.
            dtype: what weights are cast to before they cross; None: as they are.
            way: how ranks send them to the engines past this process; None: as objects that the engines read.
        """
        if not members:
            raise ValueError("a set of engines needs at least one")
        self._members = [Member(name, ranks) for name, ranks in members]
        self._max_sequences, self._dtype, self._way = max_sequences, dtype, way
        self._put: Put = self._members[0].ranks.put
        self._dispatch: Dispatch | None = None
        self._inside = self._ready = False
        facts: list[EngineFacts] = self._ask("describe")
        self.precisions = tuple(sorted({one for fact in facts for one in fact.precisions}))
        self.keeps_layout = all(fact.keeps_layout for fact in facts)

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        """Wake all engines, with the weights of `source` if there is one; at the end let them rest.

        Raises:
            RuntimeError: they are active already.
            WeightsError, EngineError: an engine's.
        """
        if self._inside:
            raise RuntimeError("the engines are active already")
        if source is None:
            self._ask("wake")
        else:
            self._bring(source, wake=True)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            if self._end("its active block ended"):
                self._ask("rest")

    def load_weights(self, source: WeightSource) -> None:
        """Let all engines take up weights, to sample from them until others come. Raises as `active` does."""
        self._end("new weights came before it finished")
        self._bring(source, wake=False)
        self._ready = True

    def _bring(self, source: WeightSource, *, wake: bool) -> None:
        """Let all engines take up the weights of a source."""
        if self._way is not None and isinstance(source, RankedWeights) and source.form is None:
            self._ask("expect", source.version, wake, None, True)
            send = partial(source.send, self._way, [member.ranks.caller for member in self._members], self._dtype)
        else:
            form, buckets = put_down(source, self._dtype, self._put)
            self._ask("expect", source.version, wake, form)
            send = partial(self._bring_buckets, buckets)
        whole = False
        try:
            send()
            whole = True
        finally:
            if not whole:
                self._ask("finish", False, quiet=True)
        self._ask("finish", True)

    def _bring_buckets(self, buckets: Iterator[Reference]) -> None:
        """Bring each bucket to all engines while the next one is made; two of them are alive at most."""
        with ExitStack() as ending, ThreadPoolExecutor(1) as ahead:
            if isinstance(buckets, Generator):
                ending.callback(buckets.close)  # ranks that gather for it have to end their pass
            taking = None
            for bucket in buckets:
                if taking is not None:
                    taking.result()
                taking = ahead.submit(self._ask, "take", bucket)
                del bucket
            if taking is not None:
                taking.result()

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> "Dispatch":
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes, whichever engine has it.

        A later call ends an earlier one.

        Raises:
            RuntimeError: the engines have no weights, or are not active.
            ValueError: a group exceeds `max_sequences`.
            RolloutError: an engine's.
        """
        if not (self._inside or self._ready):
            raise RuntimeError("generate() needs active engines: call it inside `with engines.active(source)`")
        if params.n > self._max_sequences:
            raise ValueError(f"n={params.n} samples a prompt, but max_sequences={self._max_sequences}: raise it")
        self._end("a later generate() began before it finished")
        self._ask("begin", params)
        self._dispatch = Dispatch(self._members, self._sent(prompts), params, self._max_sequences)
        return self._dispatch

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-probs [responses][response_length] that the engines' weights give to the responses.

        Every engine computes all of them.

        Raises:
            EngineError: two engines differ by more than rounding: one has other weights.
            RolloutError: an engine's.
        """
        found: list[list[list[float]]] = self._ask("logprobs_of", self._sent(prompts), list(responses), temperature)
        tolerance = max(TOLERANCE.get(getattr(torch, name), 0.0) for name in self.precisions)
        for member, own in zip(self._members[1:], found[1:], strict=True):
            if responses and not (gap := widest_gap(own, found[0])) <= tolerance:
                raise EngineError(
                    f"{self._members[0].name} and {member.name} give the same responses log-probs that differ by "
                    f"{gap:.3g} of their size (tolerance {tolerance:g}): one of them has other weights"
                )
        return found[0]

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        """Compare every engine's weights with what they are to be; see `r1_rollout.checksums`."""
        return merged(self._ask("compare", dict(expected)))

    def _sent(self, prompts: Sequence[PromptLike]) -> list[SentPrompt]:
        return [
            SentPrompt(
                prompt.id,
                prompt.token_ids,
                prompt.position_ids,
                put_inputs(prompt.model_inputs, self._put) if prompt.model_inputs else {},
            )
            for prompt in prompts
        ]

    def _end(self, reason: str) -> bool:
        """End the call that is running; return whether the engines are alive."""
        dispatch, self._dispatch = self._dispatch, None
        return dispatch is None or dispatch.end(reason)

    def _ask(self, verb: str, *args: Any, quiet: bool = False) -> list[Any]:
        """Ask all engines at the same time; return their answers when all have given one. Raises the first error."""
        with ThreadPoolExecutor(len(self._members)) as threads:
            asked = [threads.submit(member.ranks.ask, verb, *args) for member in self._members]
        errors = [error for one in asked if (error := one.exception())]
        if errors and not quiet:
            raise _told(errors[0])
        return [] if errors else [one.result() for one in asked]


class Dispatch:
    """The groups of one `generate` call.

    A prompt goes to the engine that owes the fewest tokens of those that have room. What an engine has not got room for
    waits here, so that none is left with a queue while another is idle.
    """

    def __init__(
        self, members: Sequence[Member], prompts: Sequence[SentPrompt], params: SamplingParams, max_sequences: int
    ) -> None:
        self._members, self._prompts, self._params = members, prompts, params
        self._room = max_sequences // params.n + RESERVE  # groups
        self._waiting = deque(range(len(prompts)))
        self._left = len(prompts)
        self._arrived: SimpleQueue[Numbered | BaseException] = SimpleQueue()
        self._changed = threading.Condition()
        self._over = self._dead = False
        self._ended: BaseException | None = None  # why there are no more groups, though some are missing
        for member in members:
            member.owed, member.calls = 0, 0
            member.inbox, member.unfinished = [], set()
        self._hand_out()
        self._threads = [
            threading.Thread(target=self._serve, args=(member,), daemon=True, name=f"r1-{member.name}")
            for member in members
            for _ in range(CALLS)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> "Dispatch":
        return self

    def __next__(self) -> Numbered:
        """Wait for a group. Raises what an engine raises, and RuntimeError if the call was ended."""
        if not self._left:
            self.end("it is complete")
            raise StopIteration
        arrived = self._ended or self._arrived.get()
        if isinstance(arrived, BaseException):
            self._ended = arrived
            raise arrived
        self._left -= 1
        return arrived

    def close(self) -> None:
        """Give up what is unfinished; afterwards there are no more groups."""
        self._left = 0
        self.end("it was closed")

    def end(self, reason: str) -> bool:
        """Close the call, and say why to a consumer who asks for more; return whether the engines are alive."""
        with self._changed:
            if not self._over:
                self._ended = RuntimeError(f"this generate() call is over: {reason}")
                self._arrived.put(self._ended)
            self._over = True
            self._changed.notify_all()
        for thread in () if self._dead else self._threads:
            thread.join()
        return not self._dead

    def _hand_out(self) -> None:
        """Give waiting prompts to the engines that have room. The lock must be held."""
        while self._waiting:
            free = [member for member in self._members if len(member.unfinished) < self._room]
            if not free:
                return
            member, number = min(free, key=lambda member: member.owed), self._waiting.popleft()
            member.inbox.append(number)
            member.unfinished.add(number)
            member.owed += self._cost(number)

    def _cost(self, number: int) -> int:
        """Tokens that a group may take: its prompt once, shared by the samples, and all their answers."""
        return len(self._prompts[number].token_ids) + self._params.n * self._params.max_tokens

    def _serve(self, member: Member) -> None:
        """Call an engine again and again, in one of its threads here."""
        while (numbers := self._next(member)) is not None:
            finished: list[Numbered] = []
            try:
                finished = member.ranks.ask("work", [(number, self._prompts[number]) for number in numbers])
            except BaseException as error:  # a thread's error must reach the consumer
                with self._changed:
                    self._over, self._dead = True, self._dead or isinstance(error, ClusterError)
                self._arrived.put(_told(error))
            with self._changed:
                member.calls -= 1
                for number, _ in finished:
                    member.unfinished.discard(number)
                    member.owed -= self._cost(number)
                self._hand_out()
                self._changed.notify_all()
            for group in finished:
                self._arrived.put(group)

    def _next(self, member: Member) -> list[int] | None:
        """Wait until an engine is to be called; return the prompts that it gets then, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or member.inbox or member.calls < len(member.unfinished))
            if self._over:
                return None
            numbers, member.inbox = member.inbox, []
            member.calls += 1
            return numbers


def _told(error: BaseException) -> BaseException:
    """Return an error as one of sampling: where an engine is gone, the learner is what it was."""
    return EngineError(str(error)) if isinstance(error, ClusterError) else error
