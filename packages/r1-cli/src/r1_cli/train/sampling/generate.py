"""From prompts to scored groups: groups that have finished are scored while the engine samples the others."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from r1_cli.runs.track.stopwatch import Stopwatch
from r1_cli.train.groups.group import Group, to_group, to_reward_inputs
from r1_cli.train.roles import Dataset, Progress, Sampler
from r1_data.types import DataError, Prompt
from r1_rewards.types import RewardInput, Score, Verifier
from r1_rollout.types import Completion, Drainable, Generator, SamplingParams

UNCOUNTED = 8  # the latest groups, which are not waited for: they are scored while the engine goes on

log = logging.getLogger("r1")


class DrainRule:
    """Tells a `Drainable` engine to begin no further prompt once so many groups count as are needed.

    When that happens must not depend on how fast anything is, or a resumed run would be another run. So it follows
    from the order of the groups alone: of the groups that have come, all but the latest `UNCOUNTED` are waited for and
    counted, and they are as soon as they could be enough.
    """

    def __init__(self, missing: int, counts: Callable[[Group], bool]) -> None:
        self.missing = missing  # groups that must still count; none from 0 on
        self._counts = counts
        self._uncounted: deque[int] = deque()

    def observe(self, index: int, group_of: Callable[[int], Group], engine: Generator) -> None:
        """Take note that the group of prompt `index` has come; `group_of` waits for a group's scores."""
        if not isinstance(engine, Drainable):
            return
        self._uncounted.append(index)
        ready = len(self._uncounted) - UNCOUNTED
        if 0 < self.missing <= ready:
            for _ in range(ready):
                self.missing -= self._counts(group_of(self._uncounted.popleft()))
            if self.missing <= 0:
                engine.drain()


def render_prompts(dataset: Dataset, rows: Sequence[int]) -> Iterator[tuple[int, Prompt]]:
    """Yield `rows` and their prompts. They were checked before the run; one that goes bad later is named, left out."""
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
    """Sample `params.n` completions of each prompt and score them; return the groups by their places in `prompts`.

    A response whose score depends on no other is scored in a thread as soon as its group has finished. A batch function
    may compare responses, and gets all of its sources in one call at the end. The stage `gen` is the time that the
    engine takes, `reward` what is waited for scores beyond it.

    With `enough`, prompts that the engine had not begun when there were enough groups are missing from the result.

    Raises:
        RewardFailure: a response could not be scored, where that ends the run.
        RuntimeError: the engine has lost prompts.
    """
    completions: dict[int, list[Completion]] = {}
    inputs: dict[int, list[RewardInput]] = {}

    def group(index: int, scores: Sequence[Score]) -> Group:
        prompt, problem = prompts[index], None
        if not any(score.parts.get("accuracy", score.value) > 0 for score in scores if not score.error):
            problem = sampler.truth_problem(prompt.source, prompt.ground_truth, prompt.metadata)
        return to_group(prompt, completions[index], inputs[index], scores, problem)

    with ScoringThread(sampler.verifier, watch) as thread:

        def group_of(index: int) -> Group:
            return group(index, thread.scores(index))

        with watch("gen"):
            sampling = sampler.generator.generate(with_distinct_ids(prompts), params)
        finished = progress(sampling, what, len(prompts))
        for index, sampled in watch.each("gen", finished):
            completions[index] = sampled
            with watch.beside("decode"):
                inputs[index] = to_reward_inputs(
                    prompts[index], sampled, sampler.tokenizer, skip_special_tokens=sampler.skip_special_tokens
                )
            if sampler.per_sample(prompts[index].source):
                thread.put(index, inputs[index])
                if drain_rule is not None:
                    with watch("reward"):
                        drain_rule.observe(index, group_of, sampler.generator)
        if len(inputs) < len(prompts) and (drain_rule is None or drain_rule.missing > 0):
            raise RuntimeError(f"the engine has answered {len(inputs)} of {len(prompts)} prompts and says it is done")
        with watch("reward"):
            order = sorted(inputs)
            together = [index for index in order if not sampler.per_sample(prompts[index].source)]
            scores = score_together(sampler.verifier, together, inputs)
            scores |= {index: thread.scores(index) for index in order if index not in scores}
    groups = {index: group(index, scores[index]) for index in order}
    report_failures(
        [item for index in order for item in inputs[index]],
        [score for index in order for score in scores[index]],
        sampler.failures_shown,
    )
    report_unusable_ground_truths(groups.values(), sampler.failures_shown)
    return groups


def with_distinct_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Give each further copy of a prompt an id of its own, or its samples would be the first copy's once more.

    A source that is smaller than its share of a batch has rows in it twice.
    """
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
    """Score in one call, in this order, what is in `inputs`; return the scores under the same keys."""
    if not order:
        return {}
    scores = iter(verifier([item for index in order for item in inputs[index]]))
    return {index: [next(scores) for _ in inputs[index]] for index in order}


def report_failures(inputs: Sequence[RewardInput], scores: Sequence[Score], shown: set[str]) -> None:
    """Say once per cause which response could not be scored, and how many; the metrics count every one."""
    failed = [(item, score, score.error) for item, score in zip(inputs, scores, strict=True) if score.error]
    counts = Counter(error.cause for _, _, error in failed)
    for item, score, error in failed:
        if error.cause not in shown:
            shown.add(error.cause)
            log.warning(
                "the reward failed on %d of %d responses (%s): %s\n"
                "  first such response: %.300r (ground truth %.100r)\n"
                "  such responses %s; later ones are counted in reward/failures",
                counts[error.cause], len(inputs), error.cause, error.message, item.response, item.ground_truth,
                "get worker.reward.failure_score" if score.keep else "leave their groups",
            )  # fmt: skip


def report_unusable_ground_truths(groups: Iterable[Group], shown: set[str]) -> None:
    """Say once which prompt has a ground truth that nothing can meet; the metrics count every one."""
    for group in groups:
        if group.truth_problem and "truth" not in shown:
            shown.add("truth")
            log.warning(
                "no response to %s can be right: %s\n  `r1 data check` names all such rows; later ones are counted in "
                "reward/unusable_truths",
                group.prompt.id, group.truth_problem,
            )  # fmt: skip


class ScoringThread:
    """Scores responses in the order in which they come; what comes while it is busy is scored in one call.

    So it suits verifiers only whose scores do not depend on what else is in the call. Used in a `with` block, at whose
    end it stops after the call that it is in; nobody waits for that, so that an interrupt is not held up.
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
        """Let `inputs` be scored, to be asked for under `key`."""
        with self._changed:
            if not self._thread.is_alive() and self._error is None:
                self._thread.start()
            self._waiting[key] = list(inputs)
            self._changed.notify_all()

    def scores(self, key: int) -> list[Score]:
        """Wait for the scores of what was put under `key`. Raises what the verifier raised."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._scores or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._scores[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._take():
            try:
                with self._watch.beside("score"):
                    scored = score_together(self._verifier, list(batch), batch)
            except BaseException as error:  # it is raised where the scores are asked for
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= scored
                self._changed.notify_all()

    def _take(self) -> dict[int, list[RewardInput]]:
        """Wait for something to score and return it all; {} at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, self._waiting = self._waiting, {}
            return {} if self._closed else batch
