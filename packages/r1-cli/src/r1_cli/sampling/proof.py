"""Proof that the engine samples from the learner's weights: a canary after every sync, or the run stops."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

from r1_cli.groups.group import to_sample
from r1_cli.roles import Learner, Scorer
from r1_rollout.canary import Canary
from r1_rollout.fault import Engine, ParameterRows, find_fault
from r1_rollout.types import Drainable, Groups, PromptLike, SamplingParams
from r1_rollout.weights import Weights

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class LearnerReference:
    """The learner as the canary reads it."""

    learner: Learner

    def weights(self) -> Weights:
        return self.learner.weights()

    def logprobs_of(self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of each response token, at the learner's temperature."""
        samples = [to_sample(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        annotated = self.learner.annotate(samples, ["old_logprobs"])
        return [s.old_logprobs[s.loss_mask].tolist() for s in annotated if s.old_logprobs is not None]

    @contextmanager
    def zeroed(self, rows: ParameterRows) -> Iterator[None]:
        """Inside the block these rows of its weights are zero; after it, what they were."""
        self.learner.ablate(rows)
        try:
            yield
        finally:
            self.learner.restore()


@dataclass(slots=True)
class ProvenGenerator:
    """A `Generator` that samples only after the engine has shown that it has the learner's weights."""

    engine: Engine
    reference: LearnerReference
    canary: Canary
    gap: float = field(default=0.0, init=False)  # of the last sync, see `canary.widest_gap`

    @contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator[None]:
        """Wake the engine as its own `awake` does.

        Raises:
            StaleWeights: its log-probs are not the learner's; nothing has been sampled with these weights.
        """
        probes = self.canary.probes
        expected = self.reference.logprobs_of(probes.prompts, probes.responses)
        with self.engine.awake(weights, version):
            self.gap = self.canary.gap(self.engine, expected)
            if self.canary.accepts(self.gap):
                yield
                return
        log.error(
            "version %d: engine and learner differ by %.3g of their log-probs; looking for the cause", version, self.gap
        )
        raise find_fault(self.canary, self.engine, self.reference, version, self.gap)

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Groups:
        """Sample as the engine does."""
        return self.engine.generate(prompts, params)


class ProvenDrainable(ProvenGenerator):
    """One whose engine can be drained."""

    def drain(self) -> None:
        """See `r1_rollout.types.Drainable`."""
        cast(Drainable, self.engine).drain()


def prove(scorer: Scorer, learner: Learner, canary: Canary) -> Scorer:
    """Return the scorer with an engine that samples only after the canary."""
    engine = cast(Engine, scorer.generator)  # all of r1-rollout's can score
    proven = ProvenDrainable if isinstance(engine, Drainable) else ProvenGenerator
    return replace(scorer, generator=proven(engine, LearnerReference(learner), canary))
