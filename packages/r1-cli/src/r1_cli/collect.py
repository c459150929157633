"""Filling a batch: sample groups, score them, and keep those that can teach something."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from r1_cli.roles import Dataset, Progress, Run, Scorer
from r1_cli.samples import Group, decode, reward_inputs
from r1_cli.stopwatch import Stopwatch
from r1_data.types import DataError, Prompt
from r1_rewards.types import RewardInput, Score
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, and how many prompt batches of the stream have been used up after it."""

    groups: list[Group]
    cursor: int
    sampled: int  # groups sampled, kept or not


def collect(run: Run, cursor: int, watch: Stopwatch) -> Batch:
    """Sample until `rollout_batch_size` groups pass the filter (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11).

    Fewer groups than wanted after `max_try_make_batch` batches make a smaller step, with a warning. If none passed,
    the last batch is trained on as it is: its advantages are zero, and only a KL term acts. Prompts that cannot be read
    make a step smaller, too.

    Raises:
        DataError: not one prompt could be read.
    """
    wanted, limit = run.schedule.rollout_batch_size, run.schedule.max_try_make_batch
    kept: list[Group] = []
    sampled = tries = 0
    while len(kept) < wanted:
        indices = run.stream.batch(cursor + tries)
        prompts = list(read_prompts(run.dataset, indices))
        wanted = max(1, wanted - (len(indices) - len(prompts)))
        params = replace(run.sampling, seed=derive_seed(run.sampling.seed, cursor + tries))
        groups = sample_groups(run.scorer, prompts, params, watch, run.progress)
        if run.baseline_sampling:
            greedy = sample_groups(run.scorer, prompts, run.baseline_sampling, watch, run.progress)
            groups = [replace(g, baseline=one.scores[0].value) for g, one in zip(groups, greedy, strict=True)]
        kept += [group for group in groups if run.keep(group)]
        sampled += len(groups)
        tries += 1
        if tries == limit and len(kept) < wanted:
            message = "only %d of %d groups passed the filter after trainer.max_try_make_batch=%d batches"
            log.warning(message, len(kept), wanted, limit)
            kept = kept or groups
            break
    if not kept:
        raise DataError(f"none of the {tries} prompt batches from number {cursor} on could be read")
    return Batch(kept[:wanted], cursor + tries, sampled)


def read_prompts(dataset: Dataset, indices: Iterable[int]) -> Iterator[Prompt]:
    """Yield the prompts at `indices`. Rows were checked before the run; one that goes bad later is named, left out."""
    for index in indices:
        try:
            yield dataset[index]
        except DataError as error:
            log.warning("left out of this step: %s", error)


def sample_groups(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    watch: Stopwatch,
    progress: Progress,
    what: str = "sampling",
) -> list[Group]:
    """Sample `params.n` answers to each prompt and score them all in one call to the verifier."""
    with watch("gen"):
        finished = dict(progress(scorer.generator.generate(prompts, params), what, len(prompts)))
    completions = [finished[i] for i in range(len(prompts))]
    responses = [decode(c, scorer.tokenizer, skip_special_tokens=scorer.skip_special_tokens) for c in completions]
    with watch("reward"):
        inputs = [
            item
            for prompt, group, texts in zip(prompts, completions, responses, strict=True)
            for item in reward_inputs(prompt, group, texts)
        ]
        scores = scorer.verifier(inputs)
    report_failures(inputs, scores, scorer.failures_shown)
    n = params.n
    return [
        Group(prompt, completions[i], responses[i], scores[i * n : (i + 1) * n]) for i, prompt in enumerate(prompts)
    ]


def report_failures(inputs: Sequence[RewardInput], scores: Sequence[Score], shown: set[str]) -> None:
    """Say once per cause which answer could not be scored, and how many; the metrics count every one."""
    failed = [(item, score.error) for item, score in zip(inputs, scores, strict=True) if score.error]
    counts = Counter(error.cause for _, error in failed)
    for item, error in failed:
        if error.cause not in shown:
            shown.add(error.cause)
            log.warning(
                "the reward failed on %d of %d answers (%s): %s\n  first such answer: %.300r (ground truth %.100r)\n"
                "  failed answers get worker.reward.failure_score; later ones are counted in reward/failures",
                counts[error.cause], len(inputs), error.cause, error.message, item.response, item.ground_truth,
            )  # fmt: skip


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed for (seed, keys), the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
