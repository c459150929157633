"""Filling a batch: sample groups, score them, and keep those that can teach something."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from r1_cli.config import ConfigError, Problem
from r1_cli.roles import Dataset, Position, Progress, Run, Scorer
from r1_cli.samples import Group, decode, drop_failures, reward_inputs
from r1_cli.stopwatch import Stopwatch
from r1_core.filtering import GroupFilter
from r1_data.types import DataError, Prompt
from r1_rewards.types import RewardFailure, RewardInput, Score
from r1_rollout.types import SamplingParams

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, and how many prompt batches of the stream have been used up after it."""

    groups: list[Group]
    cursor: int
    sampled: int  # groups sampled, kept or not
    passed: int  # groups that passed the filter
    next_filter: GroupFilter  # the filter of the next step


def collect(run: Run, at: Position, watch: Stopwatch) -> Batch:
    """Sample until `rollout_batch_size` groups pass the filter (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11).

    Fewer groups than wanted after `max_try_make_batch` batches make a smaller step, with a warning. If none passed,
    the last batch is trained on as it is: its advantages are zero, and only a KL term acts. Prompts that cannot be read
    make a step smaller, too.

    Raises:
        DataError: not one prompt could be read.
        ConfigError: in a run's first step, no score has the part that the filter is to look at.
        RewardFailure: an answer could not be scored, where that ends the run; or not one could.
    """
    wanted, limit = run.schedule.rollout_batch_size, run.schedule.max_try_make_batch
    kept: list[Group] = []
    judged: list[list[float]] = []  # what the filter looks at, of each group sampled
    parts: set[str] = set()  # names of what the verifier reported
    tries = 0
    while len(kept) < wanted:
        groups, unread = sample_batch(run, at.cursor + tries, watch)
        wanted = max(1, wanted - unread)
        values = filter_values(groups, run.filter_key)
        kept += [group for group, keep in zip(groups, passes(at.filter, values), strict=True) if keep]
        judged += values
        parts |= {name for group in groups for score in group.scores for name in score.parts}
        tries += 1
        if tries == limit and len(kept) < wanted:
            message = "only %d of %d groups passed the filter after trainer.max_try_make_batch=%d batches"
            log.warning(message, len(kept), wanted, limit)
            break
    if at.step == 0 and parts and run.filter_key not in {*parts, "overall"}:
        message = f"the reward function reports no such part, only {', '.join(sorted(parts))}"
        raise ConfigError([Problem("algorithm.filter_key", message, run.filter_key)])
    passed = len(kept)
    kept = kept or groups
    if not kept:
        raise DataError(f"none of the {tries} prompt batches from number {at.cursor} on could be read")
    return Batch(kept[:wanted], at.cursor + tries, len(judged), passed, at.filter.observe(*by_sample(judged)))


def sample_batch(run: Run, number: int, watch: Stopwatch) -> tuple[list[Group], int]:
    """Return the groups of a prompt batch of the stream, punished, and how many of its prompts could not be read."""
    indices = run.stream.batch(number)
    prompts = list(read_prompts(run.dataset, indices))
    run.dataset.prefetch(run.stream.batch(number + 1))
    params = replace(run.sampling, seed=derive_seed(run.sampling.seed, number))
    groups = sample_groups(run.scorer, prompts, params, watch, run.progress)
    if run.baseline_sampling:
        greedy = sample_groups(run.scorer, prompts, run.baseline_sampling, watch, run.progress)
        pairs = [(group, run.shaping.punish(one)) for group, one in zip(groups, greedy, strict=True)]
        groups = [replace(group, baseline=one.rewards[0]) for group, one in pairs if one.scores[0].keep]
    # An answer that has lost all others of its group has nothing to be compared with.
    groups = [group for group in map(drop_failures, groups) if len(group.scores) >= min(2, params.n)]
    if prompts and not groups:
        raise RewardFailure("not one answer to a batch of prompts could be scored, and all have been dropped")
    return [run.shaping.punish(group) for group in groups], len(indices) - len(prompts)


def filter_values(groups: Sequence[Group], key: str) -> list[list[float]]:
    """Return what the filter looks at, of each answer of each group: the reward, or the part `key` of the scores.

    The reward stands for a part that an answer lacks, as one does that could not be scored.
    """
    if key == "overall":
        return [group.rewards for group in groups]
    return [
        [score.parts.get(key, reward) for score, reward in zip(group.scores, group.rewards, strict=True)]
        for group in groups
    ]


def passes(group_filter: GroupFilter, values: Sequence[Sequence[float]]) -> list[bool]:
    """Return which groups the filter keeps; it says so of each sample, and the same of all of a group."""
    kept = group_filter.keep(*by_sample(values)).split([len(group) for group in values])
    return [bool(samples.any()) for samples in kept]


def by_sample(values: Sequence[Sequence[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of all groups and the group each belongs to: float64 [N] and int64 [N]."""
    lengths = torch.tensor([len(group) for group in values], dtype=torch.int64)
    flat = torch.tensor([value for group in values for value in group], dtype=torch.float64)
    return flat, torch.arange(len(values)).repeat_interleave(lengths)


def read_prompts(dataset: Dataset, indices: Sequence[int]) -> Iterator[Prompt]:
    """Yield the prompts at `indices`. Rows were checked before the run; one that goes bad later is named, left out."""
    dataset.prefetch(indices)
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
    grouped = [scores[i * n : (i + 1) * n] for i in range(len(prompts))]
    return [
        Group(prompt, completions[i], responses[i], grouped[i], [score.value for score in grouped[i]])
        for i, prompt in enumerate(prompts)
    ]


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


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a 63-bit seed for (seed, keys), the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
