"""Check after every weight sync that the engine samples from the learner's weights (the canary)."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from r1_cli.train.groups.group import to_sample
from r1_cli.train.types import Policy, Sampler, weights_of
from r1_rollout.errors import EngineError, StaleWeights
from r1_rollout.fault import ComparedLearner, Engine, ParameterRows, find_fault, name_differing
from r1_rollout.pool.pool import EnginePool
from r1_rollout.types import (
    Checksummed,
    Drainable,
    Expected,
    GenerationSession,
    Generator,
    Groups,
    Interactive,
    PromptLike,
    Replaying,
    SamplingParams,
)
from r1_rollout.weight_checks import ByteProof, Canary, expected_checksums
from r1_rollout.weights import WeightSource

log = logging.getLogger("r1")
_UNCOMPARED = (
    "the engine keeps %d of %d weights in a layout of its own, %s first: not their bytes but log-probs are "
    "compared with the learner's, and if the engine shows these weights, they must change as the learner's do"
)


@dataclass(frozen=True, slots=True)
class LearnerReference(ComparedLearner):
    learner: Policy

    def weights(self, version: int) -> WeightSource:
        return weights_of(self.learner, version)

    def logprobs_of(self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        samples = [to_sample(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        annotated = self.learner.add_logprobs(samples, ["old_logprobs"])
        return [s.old_logprobs[s.loss_mask].tolist() for s in annotated if s.old_logprobs is not None]

    @contextmanager
    def zeroed(self, rows: ParameterRows) -> Iterator[None]:
        self.learner.zero_weights(rows)
        try:
            yield
        finally:
            self.learner.restore_weights()


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    logprobs: list[list[float]]  # of the probes
    sums: Mapping[str, Expected] | None  # of the weights; None if the engine has no checksums
    pictures: list[list[float]] | None  # log-probs of two pictures; first sync only
    opening: list[list[float]] | None = None  # log-probs of the longer probes; first sync only


@dataclass(slots=True)
class CheckedGenerator:
    """A generator that samples only after the engine has proved its weights equal to the learner's."""

    engine: Engine
    reference: LearnerReference
    canary: Canary
    gap: float = field(default=0.0, init=False)  # of the last sync, see `canary.widest_gap`
    _bytes: ByteProof = field(init=False)
    _started: bool = field(default=False, init=False)  # a sync was checked
    _same_bytes: bool = field(default=False, init=False)  # at the last sync all tensors were equal

    def __post_init__(self) -> None:
        self._bytes = ByteProof(isinstance(self.engine, Checksummed) and self.engine.keeps_layout)

    @contextmanager
    def active(self, source: WeightSource | None = None) -> Iterator[None]:
        """Activate the engine and check weights that it loads.

        Raises:
            StaleWeights: bytes or log-probs differ from the learner's; nothing was sampled.
        """
        expected = self.expect(source) if source is not None else None
        with self.engine.active(source):
            if source is None or expected is None or self._agrees(source, expected):
                yield
                return
        raise self._fault(source.version)

    @contextmanager
    def active_later(self, source: WeightSource, expected: ExpectedWeights) -> Iterator[None]:
        """Activate the engine with weights that `expect` described earlier.

        Raises StaleWeights without a search for the cause, as the learner's weights have changed.
        """
        with self.engine.active(source):
            if not self._agrees(source, expected):
                seen = f"log-probs of engine and learner on fixed sequences differ by {self.gap:.3g} of their size"
                found = "not searched, as the learner has other weights by now; trainer.max_staleness=0 names it"
                raise StaleWeights("the weights", found, version=source.version, seen=seen, gap=self.gap)
            yield

    def load_weights(self, source: WeightSource) -> None:
        expected = self.expect(source)
        self.engine.load_weights(source)
        if not self._agrees(source, expected):
            raise self._fault(source.version)

    def expect(self, source: WeightSource) -> ExpectedWeights:
        """Compute what the engine must match, before the sync: the learner may need memory that the engine takes."""
        probes, sums = self.canary.probes, None
        if isinstance(self.engine, Checksummed):
            kinds, same = self.engine.precisions, self.engine.keeps_layout
            sums = source.run_with_weights(partial(expected_checksums, precisions=kinds, keeps_layout=same))
        opening = self.canary.opening.probes if self.canary.opening else None
        once = (None, None) if self._started else (self.canary.pictures, opening)
        seen = [self.reference.logprobs_of(one.prompts, one.responses) if one else None for one in once]
        return ExpectedWeights(self.reference.logprobs_of(probes.prompts, probes.responses), sums, *seen)

    def _agrees(self, source: WeightSource, expected: ExpectedWeights) -> bool:
        """Compare checksums, then log-probs; at the first sync also the longer probes and two pictures.

        Raises:
            StaleWeights: the checksum of a weight differs that must not.
            EngineError: the engine cannot show a weight that it should, or its model does not see pictures.
        """
        found = cast(Checksummed, self.engine).compare(expected.sums) if expected.sums else None
        if found is not None:
            if stale := self._bytes.stale(found):
                raise name_differing(stale, source.version)
            if self._bytes.keeps_layout and found.unread:
                raise EngineError(
                    f"{len(found.unread)} of the engine's weights cannot be compared with the learner's "
                    f"byte by byte, {found.unread[0]} first: nothing would show that they are stale"
                )
        self.gap = self.canary.gap(self.engine, expected.logprobs)
        accepted = self.canary.accepts(self.gap)
        self._same_bytes = found is not None and not found.differing and not found.unread
        if expected.pictures and (accepted or self._same_bytes):
            self._require_pictures(expected.pictures)
        if accepted and expected.sums and found is not None and (uncompared := self._bytes.take(found, expected.sums)):
            log.warning(_UNCOMPARED, len(uncompared), len(expected.sums), uncompared[0])
        if accepted and expected.opening and self.canary.opening:
            accepted = self._opens(self.canary.opening, expected.opening)
        self._started |= accepted
        return accepted

    def _require_pictures(self, expected: list[list[float]]) -> None:
        if not self.canary.tells_pictures_apart(self.engine, expected):
            raise EngineError(
                "the engine gives two different pictures the same log-probs, and the learner does not: pictures do not "
                "reach its model. Use the embedded engine (worker.rollout.name=embedded), or vLLM servers"
            )

    def _opens(self, opening: Canary, expected: list[list[float]]) -> bool:
        """Check the longer probes. If they disagree, they give the gap and the search for the fault."""
        gap = opening.gap(self.engine, expected)
        if not (accepted := opening.accepts(gap)):
            self.gap, self.canary = gap, opening
        return accepted

    def _fault(self, version: int) -> StaleWeights:
        log.error(
            "version %d: log-probs of engine and learner differ by %.3g of their size; searching the cause",
            version,
            self.gap,
        )
        return find_fault(self.canary, self.engine, self.reference, version, self.gap, same_bytes=self._same_bytes)

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Groups:
        return self.engine.generate(prompts, params)

    def open_session(self, params: SamplingParams) -> GenerationSession:
        """Raises EngineError if the engine takes no requests while it generates."""
        if not isinstance(self.engine, Interactive):
            raise EngineError(f"{type(self.engine).__name__} has no open_session, which episodes of several turns need")
        return self.engine.open_session(params)


class CheckedDrainable(CheckedGenerator):
    def drain(self) -> None:
        cast(Drainable, self.engine).drain()


def add_weight_check(sampler: Sampler, learner: Policy, canary: Canary) -> Sampler:
    """Return the sampler with an engine that samples only after the check.

    Raises:
        EngineError: the engine cannot compute log-probs of given responses.
    """
    if not isinstance(sampler.generator, Replaying):
        raise EngineError(
            f"worker.rollout.canary=true: {type(sampler.generator).__name__} has no logprobs_of, which the canary asks "
            "after every sync; set false to sample without the weight check"
        )
    engine = cast(Engine, sampler.generator)
    if isinstance(engine, EnginePool) and canary.opening is not None:
        engine.tolerance = canary.opening.tolerance  # learned from the model's rounding noise, not its precision alone
    checked = CheckedDrainable if isinstance(engine, Drainable) else CheckedGenerator
    return replace(sampler, generator=checked(engine, LearnerReference(learner), canary))


def canary_metrics(generator: Generator) -> dict[str, float]:
    return {"rollout/canary_gap": generator.gap} if isinstance(generator, CheckedGenerator) else {}
