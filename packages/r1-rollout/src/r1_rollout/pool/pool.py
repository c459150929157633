"""Several engines behind the `Generator` interface: load balancing, weight sync, and a check that all agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from r1_rollout.errors import EnginesDisagree
from r1_rollout.pool.dispatch import Dispatch, Fleet, Member
from r1_rollout.pool.session import DispatchedRequests, PoolSession
from r1_rollout.pool.tasks import MemberLost
from r1_rollout.types import Comparison, Expected, OldEngineNames, PromptLike, SamplingParams
from r1_rollout.weight_checks import TOLERANCE, merged, widest_gap
from r1_rollout.weights import WeightSource, dtype_named

if TYPE_CHECKING:
    from r1_rollout.types import Tokens

M = TypeVar("M", bound=Member)
Result = TypeVar("Result")


class EnginePool(OldEngineNames, Generic[M]):
    """A `Generator`, `Replaying` and `Checksummed` over engines that are all alike.

    Any member may sample any prompt: the noise depends on prompt, sample and seed alone. A pool is not `Drainable`:
    which prompts have begun depends on timing. Subclasses sync weights (`_sync`) and check requests.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_sequences: int,
        precisions: Sequence[str],
        keeps_layout: bool = False,
        max_attempts: int = 1,
    ) -> None:
        """`max_sequences`: samples that decode at the same time in each; `max_attempts`: members a group is tried on.

        `precisions`, `keeps_layout`: see `Checksummed`.
        """
        self._fleet, self._max_sequences, self._max_attempts = fleet, max_sequences, max_attempts
        self.precisions, self.keeps_layout = tuple(precisions), keeps_layout
        # How far log-probs of two members may differ, see `widest_gap`. Until a tolerance is learned from the model's
        # rounding noise, that of the coarsest precision.
        self.tolerance = max(TOLERANCE.get(dtype_named(name), 0.0) for name in precisions)
        self._call: Dispatch | PoolSession | None = None  # the last one
        self._inside = self._stays_ready = False

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        if self._inside:
            raise RuntimeError("the pool is active already")
        if source is None:
            self._activate()
        else:
            self._replace(source, activate=True)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            self._end("its active block ended")
            if not self._fleet.broken:
                self._offload()

    def load_weights(self, source: WeightSource) -> None:
        self._replace(source, activate=False)
        self._stays_ready = True

    def _replace(self, source: WeightSource, *, activate: bool) -> None:
        self._check_version(source.version)
        self._end("new weights came before it finished")
        self._sync(source, activate=activate)

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Dispatch:
        self._require_active("generate")
        self._require_capacity(params)
        self._check_sampling(prompts, params)
        self._end("a later generate() began before it finished")
        self._call = dispatch = self._start(self._prepare(prompts), params)
        return dispatch

    def open_session(self, params: SamplingParams) -> PoolSession:
        self._require_active("open_session")
        self._check_sampling([], params)
        self._end("a later session began")
        requests = DispatchedRequests(self._start([], params, session=True))

        def submit(key: str, prompt: PromptLike, request: SamplingParams, split: bool) -> None:
            self._require_capacity(request)
            self._check_sampling([prompt], request)
            (sent,) = self._prepare([prompt])
            requests.submit(key, sent, request, split=split)

        self._call = session = PoolSession(requests, params, submit)
        return session

    def _start(self, prompts: Sequence[PromptLike], params: SamplingParams, *, session: bool = False) -> Dispatch:
        limits = {"max_sequences": self._max_sequences, "max_attempts": self._max_attempts}
        dispatch = Dispatch(self._fleet, prompts, params, session=session, **limits)
        members: Sequence[Any] = self._fleet.members
        opened: dict[Any, Any] = self._each(lambda member: member.open(params, dispatch), members)
        return dispatch.start(opened)

    def _require_capacity(self, params: SamplingParams) -> None:
        if params.n > self._max_sequences:
            raise ValueError(f"n={params.n} samples a prompt, but max_sequences={self._max_sequences}: raise it")

    def logprobs_of(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float = 1.0
    ) -> list[list[float]]:
        """Compute all on every member. Raises EnginesDisagree if two differ by more than rounding."""
        self._require_active("logprobs_of")
        self._check_replay(prompts, responses, temperature)
        sent, members = self._prepare(prompts), self._ready()
        found = self._each(lambda member: member.logprobs_of(sent, responses, temperature), members)
        logprobs = [*found.values()]
        if responses:
            require_agreement([member.name for member in found], logprobs, self.tolerance)
        return logprobs[0]

    def compare(self, expected: Mapping[str, Expected]) -> Comparison:
        self._require_active("compare")
        return merged([*self._each(lambda member: member.compare(dict(expected)), self._ready()).values()])

    def _ready(self) -> Sequence[M]:
        with self._fleet.changed:
            ready: Sequence[Any] = self._fleet.ready()
        return ready

    def _each(self, call: Callable[[M], Result], members: Sequence[M]) -> dict[M, Result]:
        """Call all members concurrently; return the results of those that the fleet has not lost.

        Raises the first error, unless the fleet goes on without its member.
        """
        with ThreadPoolExecutor(max(1, len(members))) as threads:
            calls = {member: threads.submit(call, member) for member in members}
        found = {}
        for member, one in calls.items():
            try:
                found[member] = one.result()
            except MemberLost as error:
                if not self._fleet.retries(member, error):
                    raise
        return found

    def _end(self, reason: str) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.end(reason)

    def _require_active(self, what: str) -> None:
        if not (self._inside or self._stays_ready):
            raise RuntimeError(f"{what}() needs an active pool: call it inside `with pool.active(source)`")

    # For subclasses.

    def _sync(self, source: WeightSource, *, activate: bool) -> None:
        raise NotImplementedError

    def _activate(self) -> None: ...

    def _offload(self) -> None: ...

    def _check_version(self, version: int) -> None: ...

    def _prepare(self, prompts: Sequence[PromptLike]) -> Sequence[PromptLike]:
        return prompts

    def _check_sampling(self, prompts: Sequence[PromptLike], params: SamplingParams) -> None: ...

    def _check_replay(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", temperature: float
    ) -> None: ...


def require_agreement(names: Sequence[str], logprobs: Sequence[list[list[float]]], tolerance: float) -> None:
    """Raise EnginesDisagree if two members give the same responses other log-probs: one has other weights.

    Args:
        names: of the members.
        logprobs: of each member, [members][responses][response_length].
        tolerance: see `r1_rollout.weight_checks.widest_gap`.
    """
    for name, own in zip(names[1:], logprobs[1:], strict=True):
        if not (gap := widest_gap(own, logprobs[0])) <= tolerance:
            raise EnginesDisagree(
                f"{names[0]} and {name} give the same responses log-probs that differ by {gap:.3g} of their size "
                f"(tolerance {tolerance:.3g}): one of them has other weights"
            )
