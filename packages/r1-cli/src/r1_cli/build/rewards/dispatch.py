"""The verifiers of a run: a default, and those that sources name."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r1_cli.build.rewards.ground_truths import GroundTruthReader
from r1_cli.build.rewards.mixed import MixedVerifier, open_asking
from r1_cli.build.rewards.reference_verifier import ReferenceVerifier
from r1_cli.build.user_code import find_in_process
from r1_cli.config import RunConfig
from r1_cli.config.sources import Source
from r1_rewards.load import load
from r1_rewards.types import OpenVerifier, RewardInput, Score, Verifier
from r1_rewards.workers.arguments import check_columns
from r1_rewards.workers.in_process import InProcessVerifier
from r1_rewards.workers.pool import PooledVerifier

if TYPE_CHECKING:
    from r1_cli.train.types import Dataset


class DispatchingVerifier:
    def __init__(
        self,
        default: Verifier | None,
        by_source: Mapping[str, Verifier],
        truths: GroundTruthReader | None = None,
        asking: Sequence[ReferenceVerifier] = (),
    ) -> None:
        self._default, self._by_source, self._truths = default, by_source, truths
        self.asking = asking  # those among them that ask a model

    def of(self, source: str) -> Verifier:
        verifier = self._by_source.get(source, self._default)
        if verifier is None:
            raise ValueError(f"no verifier judges rows of source {source!r}")
        return verifier

    def per_sample(self, source: str) -> bool:
        """Whether no score of the source depends on another response: responses may be scored as they arrive."""
        verifier = self.of(source)
        kinds = OpenVerifier | ReferenceVerifier | MixedVerifier
        return isinstance(verifier, kinds) and verifier.per_sample

    def reference_verifiers_of(self, source: str) -> list[ReferenceVerifier]:
        verifier = self.of(source)
        if isinstance(verifier, MixedVerifier):
            return [one for _, one in verifier.asking.values()]
        return [verifier] if isinstance(verifier, ReferenceVerifier) else []

    def truth_problem(self, source: str, ground_truth: str, columns: Mapping[str, Any]) -> str | None:
        return self._truths.problem(source, ground_truth, columns) if self._truths else None

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        shares: dict[int, tuple[Verifier, list[int]]] = {}
        for index, item in enumerate(inputs):
            verifier = self.of(item.source)
            shares.setdefault(id(verifier), (verifier, []))[1].append(index)
        scores: dict[int, Score] = {}
        for verifier, indices in shares.values():
            scores |= zip(indices, verifier([inputs[index] for index in indices]), strict=True)
        return [scores[index] for index in range(len(inputs))]


class JudgedByEnvironment(OpenVerifier):
    """In the place of a reward function if the environment judges episodes, or nothing but a teacher does."""

    @property
    def per_sample(self) -> bool:
        return True

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        return [Score(0.0) for _ in inputs]


def open_verifier(config: RunConfig, sources: Sequence[Source], stack: ExitStack) -> DispatchingVerifier:
    """Open the rewards of `sources`; `stack` closes them.

    Raises:
        RewardSpecError: a reward does not exist, or does not take its keywords.
    """
    reward = config.worker.reward
    opened: list[tuple[tuple[str, dict[str, Any]], Verifier]] = []
    asking: list[ReferenceVerifier] = []

    def open_pool(spec: str, kwargs: dict[str, Any]) -> Verifier:
        path, _, name = spec.rpartition(":")
        own = find_in_process(Path(path), name)
        return stack.enter_context(
            load(
                own or spec,
                kwargs,
                timeout=reward.timeout,
                failure_score=reward.failure_score,
                failure_policy=reward.failure_policy,
                workers=reward.num_cpus,
                in_process=own is not None,
            )
        )

    def open_once(spec: str, kwargs: dict[str, Any]) -> Verifier:
        found = next((verifier for known, verifier in opened if known == (spec, kwargs)), None)
        if found is None:
            found = open_asking(spec, kwargs, open_pool, asking) or open_pool(spec, kwargs)
            opened.append(((spec, kwargs), found))
        return found

    own = {s.name: open_once(s.reward_function, s.reward_function_kwargs) for s in sources if s.reward_function}
    truths = GroundTruthReader(config, sources)
    if own and all(source.name in own for source in sources):
        return DispatchingVerifier(None, own, truths, asking)
    judged = config.worker.rollout.multi_turn.has_environment or any(source.environment for source in sources)
    judged |= not config.learns_task  # answers need no score
    if not reward.reward_function and judged:
        return DispatchingVerifier(JudgedByEnvironment(), own, truths, asking)
    default = open_once(reward.reward_function or "", reward.reward_function_kwargs)
    return DispatchingVerifier(default, own, truths, asking)


def require_columns(verifier: DispatchingVerifier, sources: Sequence[Source], datasets: "Sequence[Dataset]") -> None:
    """Raise RewardSpecError if a reward needs a column that its source's rows lack."""
    for source, dataset in zip(sources, datasets, strict=True):
        judge = verifier.of(source.name)
        if isinstance(judge, PooledVerifier | InProcessVerifier) and judge.reward.wants:
            check_columns(judge.reward.wants, dataset[0].metadata)
