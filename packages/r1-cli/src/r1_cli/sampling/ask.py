"""From prompts to scored groups: finished groups are scored while the engine samples the others."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from r1_cli.groups.group import Group, decode, reward_inputs
from r1_cli.roles import Dataset, Progress, Scorer
from r1_cli.sampling.scoring import ScoringThread
from r1_cli.track.stopwatch import Stopwatch
from r1_data.types import DataError, Prompt
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import Completion, Drainable, Generator, SamplingParams

LAG = 8  # groups that may finish while those before them are scored, before it is decided whether to go on

log = logging.getLogger("r1")


class Quota(Protocol):
    """Counts scored groups until there are enough."""

    @property
    def missing(self) -> int:
        """How many more must count; none from 0 on."""

    def note(self, group: Group) -> None:
        """Count the group, if it is one that counts."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """A group that is not scored yet."""

    prompt: Prompt
    completions: list[Completion]
    responses: list[str]
    inputs: list[RewardInput]

    def scored(self, scores: list[Score]) -> Group:
        return Group(self.prompt, self.completions, self.responses, scores, [score.value for score in scores])


def read_prompts(dataset: Dataset, rows: Sequence[int]) -> Iterator[tuple[int, Prompt]]:
    """Yield `rows` and their prompts. They were checked before the run; one that goes bad later is named, left out."""
    dataset.prefetch(rows)
    for row in rows:
        try:
            yield row, dataset[row]
        except DataError as error:
            log.warning("left out of this step: %s", error)


def sample_groups(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    watch: Stopwatch,
    progress: Progress,
    what: str = "sampling",
    quota: Quota | None = None,
) -> dict[int, Group]:
    """Sample `params.n` answers to each prompt and score them; return the groups by their places in `prompts`.

    Answers that their verifier judges alone are scored in a thread as their groups finish. A batch function gets all
    answers of its sources in one call at the end, because it may compare them. The stage `gen` is the time that the
    engine takes, `reward` what is waited for scores beyond it.

    With a `quota` that is filled, a `Drainable` engine begins no further prompt; prompts that were not begun are
    missing from the result.

    Raises:
        RewardFailure: an answer could not be scored, where that ends the run.
        RuntimeError: the engine has lost prompts.
    """
    answers: dict[int, _Answers] = {}
    with ScoringThread(scorer.verifier) as thread:

        def group(index: int) -> Group:
            return answers[index].scored(thread.scores(index))

        brake = _brake(scorer.generator, quota, group)
        finished = progress(scorer.generator.generate(tell_apart(prompts), params), what, len(prompts))
        for index, completions in watch.each("gen", finished):
            answers[index] = _read(scorer, prompts[index], completions)
            if scorer.alone(prompts[index].source):
                thread.put(index, answers[index].inputs)
                with watch("reward"):
                    brake(index)
        if len(answers) < len(prompts) and (quota is None or quota.missing > 0):
            raise RuntimeError(f"the engine has answered {len(answers)} of {len(prompts)} prompts and says it is done")
        with watch("reward"):
            together = _score_together(scorer, answers)
            groups = {index: together.get(index) or group(index) for index in sorted(answers)}
    report_failures(
        [item for index in groups for item in answers[index].inputs],
        [score for group in groups.values() for score in group.scores],
        scorer.failures_shown,
    )
    return groups


def tell_apart(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give each further copy of a prompt an id of its own, or its answers would be the first copy's once more.

    A source that is smaller than its share of a batch has rows in it twice.
    """
    copies: Counter[str] = Counter()
    apart = []
    for prompt in prompts:
        copies[prompt.id] += 1
        copy = copies[prompt.id]
        apart.append(replace(prompt, id=f"copy {copy} of {prompt.id}") if copy > 1 else prompt)
    return apart


def _brake(engine: Generator, quota: Quota | None, group_of: Callable[[int], Group]) -> Callable[[int], None]:
    """Return what is told of each group that is being scored, and drains the engine when the quota is filled.

    When that is must not depend on how fast anything is, or a resumed run would be another one. So of j groups that
    have come, the first j - LAG are waited for and counted, and no others, as soon as these could fill the quota.
    """
    if quota is None or not isinstance(engine, Drainable):
        return lambda index: None
    uncounted: deque[int] = deque()

    def note(index: int) -> None:
        uncounted.append(index)
        if 0 < quota.missing <= len(uncounted) - LAG:
            for _ in range(len(uncounted) - LAG):
                quota.note(group_of(uncounted.popleft()))
            if quota.missing <= 0:
                engine.drain()

    return note


def _read(scorer: Scorer, prompt: Prompt, completions: list[Completion]) -> _Answers:
    responses = decode(completions, scorer.tokenizer, skip_special_tokens=scorer.skip_special_tokens)
    return _Answers(prompt, completions, responses, reward_inputs(prompt, completions, responses))


def _score_together(scorer: Scorer, answers: dict[int, _Answers]) -> dict[int, Group]:
    """Score in one call, in the order of the prompts, what may not be scored alone."""
    together = [index for index in sorted(answers) if not scorer.alone(answers[index].prompt.source)]
    if not together:
        return {}
    scores = iter(scorer.verifier([item for index in together for item in answers[index].inputs]))
    return {index: answers[index].scored([next(scores) for _ in answers[index].inputs]) for index in together}


def report_failures(inputs: Sequence[RewardInput], scores: Sequence[Score], shown: set[str]) -> None:
    """Say once per cause which answer could not be scored, and how many; the metrics count every one."""
    failed = [(item, score, score.error) for item, score in zip(inputs, scores, strict=True) if score.error]
    counts = Counter(error.cause for _, _, error in failed)
    for item, score, error in failed:
        if error.cause not in shown:
            shown.add(error.cause)
            log.warning(
                "the reward failed on %d of %d answers (%s): %s\n  first such answer: %.300r (ground truth %.100r)\n"
                "  such answers %s; later ones are counted in reward/failures",
                counts[error.cause], len(inputs), error.cause, error.message, item.response, item.ground_truth,
                "get worker.reward.failure_score" if score.keep else "leave their groups",
            )  # fmt: skip
