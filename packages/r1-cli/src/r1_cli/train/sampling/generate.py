"""Sample prompts and score finished groups meanwhile. Report failures of rewards once per cause."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group, Response, as_episode, to_reward_inputs
from r1_cli.train.types import Dataset, Progress, Sampler
from r1_data.types import DataError, Prompt
from r1_rewards.types import Failure, RewardFailure, RewardInput, Score, Verifier
from r1_rollout.types import Completion, Drainable, Generator, SamplingParams

UNCOUNTED = 8  # latest groups, which are not waited for: they are scored while the engine samples

log = logging.getLogger("r1")


class UnscoredError(RewardFailure):
    """No score, or too few, of answers that were sampled."""

    def __init__(self, message: str, groups: Sequence[Group]) -> None:
        super().__init__(message)
        self.groups = groups  # the answers, with a score of 0 where there is none


@dataclass(slots=True)
class DrainRule:
    """Drains the engine once enough groups pass the filter.

    A resumed run must drain at the same group, so the rule depends on the order of groups, not on timing: once they
    could be enough, it waits for all groups but the latest `UNCOUNTED`.
    """

    missing: int  # groups that must still pass
    counts: Callable[[Group], bool]
    uncounted: deque[int] = field(default_factory=deque, init=False)

    def observe(self, index: int, group_of: Callable[[int], Group], engine: Generator) -> None:
        if not isinstance(engine, Drainable):
            return
        self.uncounted.append(index)
        ready = len(self.uncounted) - UNCOUNTED
        if 0 < self.missing <= ready:
            for _ in range(ready):
                self.missing -= self.counts(group_of(self.uncounted.popleft()))
            if self.missing <= 0:
                engine.drain()


def render_prompts(dataset: Dataset, rows: Sequence[int]) -> Iterator[tuple[int, Prompt]]:
    """Yield rows with their prompts. Rows that can no longer be read are logged and omitted."""
    dataset.prefetch(rows)
    for row in rows:
        try:
            yield row, dataset[row]
        except DataError as error:
            log.warning("left out of this step: %s", error)


def sample_groups(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    watch: Stopwatch,
    progress: Progress,
    what: str = "sampling",
    drain_rule: DrainRule | None = None,
) -> dict[int, Group]:
    """Sample `params.n` completions of each prompt and score them; return the groups by their index in `prompts`.

    Per-sample rewards are scored in a thread as soon as a group is complete. A batch reward gets all responses of its
    sources in one call at the end. Stage `gen` is the engine's time, `reward` the time spent waiting for scores.

    With `drain_rule`, prompts that the drained engine did not start are missing from the result.

    Raises:
        UnscoredError: a response could not be scored, and the failure policy is to stop.
        RuntimeError: the engine lost prompts.
    """
    completions, inputs = dict[int, list[Completion]](), dict[int, list[RewardInput]]()
    with closing(ScoringThread(sampler.verifier, watch)) as thread:

        def wait_for_group(index: int) -> Group:
            return to_group(sampler, prompts[index], completions[index], inputs[index], thread.scores(index))

        with watch("gen"):
            sampled = sampler.generate(with_distinct_ids(prompts), params)
        for index, of_prompt in watch.each("gen", progress(sampled, what, len(prompts))):
            with watch.background("decode"):
                completions[index] = of_prompt
                inputs[index] = to_reward_inputs(
                    prompts[index], of_prompt, sampler.tokenizer, skip_special_tokens=sampler.skip_special_tokens
                )
            if sampler.per_sample(prompts[index].source):
                thread.put(index, inputs[index])
                if drain_rule is not None and sampler.play is None:
                    with watch("reward"):
                        drain_rule.observe(index, wait_for_group, sampler.generator)
        order = sorted(inputs)
        if len(order) < len(prompts) and (drain_rule is None or drain_rule.missing > 0):
            raise RuntimeError(f"the engine returned {len(order)} of {len(prompts)} prompts")
        with watch("reward"):
            try:
                scores = collect_scores(sampler, prompts, inputs, order, thread)
            except RewardFailure as error:
                raise UnscoredError(str(error), without_scores(sampler, prompts, completions, inputs, error)) from error
    groups = {
        index: to_group(sampler, prompts[index], completions[index], inputs[index], scores[index]) for index in order
    }
    report_failures([(inputs[index], scores[index]) for index in order], sampler.failures_shown)
    return groups


def to_group(
    sampler: Sampler,
    prompt: Prompt,
    completions: Sequence[Completion],
    inputs: Sequence[RewardInput],
    scores: Sequence[Score],
) -> Group:
    """Return a prompt's group, with a warning at the first ground truth that no response can match."""
    problem = None
    if not any(score.parts.get("accuracy", score.value) > 0 for score in scores if not score.error):
        problem = sampler.truth_problem(prompt.source, prompt.ground_truth, prompt.metadata)
    if problem and "truth" not in sampler.failures_shown:
        sampler.failures_shown.add("truth")
        log.warning(
            "no response to %s can be correct: %s\n  `r1 data check` names all such rows; later ones "
            "are only counted, in reward/unusable_truths",
            prompt.id, problem,
        )  # fmt: skip
    responses = [
        Response(one, episode.text if (episode := as_episode(one)) else given.response, score, score.value)
        for one, given, score in zip(completions, inputs, scores, strict=True)
    ]
    return Group(prompt, responses, truth_problem=problem)


def without_scores(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    completions: Mapping[int, Sequence[Completion]],
    inputs: Mapping[int, Sequence[RewardInput]],
    error: RewardFailure,
) -> list[Group]:
    """Return the groups of answers that were not scored, with the error as the failure of each."""
    failed = Score(0.0, {}, Failure("exception", str(error)))
    return [
        to_group(sampler, prompts[index], completions[index], inputs[index], [failed] * len(inputs[index]))
        for index in sorted(inputs)
    ]


def with_distinct_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give each repetition of a prompt its own id, and so its own noise."""
    copies: Counter[str] = Counter()
    distinct = []
    for prompt in prompts:
        copies[prompt.id] += 1
        copy = copies[prompt.id]
        distinct.append(replace(prompt, id=f"copy {copy} of {prompt.id}") if copy > 1 else prompt)
    return distinct


def score_together(
    verifier: Verifier, order: Sequence[int], inputs: dict[int, list[RewardInput]]
) -> dict[int, list[Score]]:
    if not order:
        return {}
    scores = iter(verifier([item for index in order for item in inputs[index]]))
    return {index: list(islice(scores, len(inputs[index]))) for index in order}


def collect_scores(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    inputs: dict[int, list[RewardInput]],
    order: Sequence[int],
    thread: "ScoringThread",
) -> dict[int, list[Score]]:
    """Score the responses of batch rewards; wait for all other scores."""
    together = [index for index in order if not sampler.per_sample(prompts[index].source)]
    scores = score_together(sampler.verifier, together, inputs)
    return scores | {index: thread.scores(index) for index in order if index not in scores}


def report_failures(scored: Iterable[tuple[Sequence[RewardInput], Sequence[Score]]], shown: set[str]) -> None:
    failed: dict[str, list[tuple[RewardInput, Score, Failure]]] = {}  # by cause
    total = 0
    for inputs, scores in scored:
        total += len(scores)
        for item, score in zip(inputs, scores, strict=True):
            if score.error:
                failed.setdefault(score.error.cause, []).append((item, score, score.error))
    for cause, responses in failed.items():
        item, score, error = responses[0]
        if cause not in shown:
            shown.add(cause)
            log.warning(
                "the reward failed on %d of %d responses (%s): %s\n"
                "  first such response: %.300r (ground truth %.100r)\n"
                "  such responses %s; later ones are only counted, in reward/failures",
                len(responses), total, cause, error.message, item.response, item.ground_truth,
                "get worker.reward.failure_score" if score.keep else "leave their groups",
            )  # fmt: skip


class ScoringThread:
    """Scores responses in a thread; one call scores all that arrived during the last.

    Only for verifiers whose scores do not depend on the rest of the call. `close` does not wait, so that an
    interrupt is not delayed.
    """

    def __init__(self, verifier: Verifier, watch: Stopwatch) -> None:
        self._verifier, self._watch = verifier, watch
        self._changed = threading.Condition()
        self._waiting: dict[int, list[RewardInput]] = {}
        self._scores: dict[int, list[Score]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="r1-scoring", daemon=True)

    def put(self, key: int, inputs: Sequence[RewardInput]) -> None:
        with self._changed:
            if not self._thread.is_alive() and self._error is None:
                self._thread.start()
            self._waiting[key] = list(inputs)
            self._changed.notify_all()

    def scores(self, key: int) -> list[Score]:
        """Wait for the scores of `key`. Raises what the verifier raised."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._scores or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._scores[key]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._take():
            try:
                with self._watch.background("score"):
                    scored = score_together(self._verifier, list(batch), batch)
            except BaseException as error:  # `scores` raises it
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= scored
                self._changed.notify_all()

    def _take(self) -> dict[int, list[RewardInput]]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, self._waiting = self._waiting, {}
            return {} if self._closed else batch
