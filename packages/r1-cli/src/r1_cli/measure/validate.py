"""Validation during a run, and the accuracy, avg@k, pass@k and maj@k of a model's answers."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import comb
from statistics import fmean

from r1_cli.groups.group import Group
from r1_cli.measure.metrics import by_source, length_metrics, reward_metrics, source_metrics
from r1_cli.roles import Dataset, Progress, Run, Scorer
from r1_cli.sampling.ask import read_prompts, sample_groups
from r1_cli.track import Generation
from r1_cli.track.stopwatch import Stopwatch
from r1_rewards.reading.extract import final_answer
from r1_rewards.types import Score
from r1_rollout.types import SamplingParams


def validate(run: Run, step: int) -> tuple[dict[str, float], list[Generation]]:
    """Answer the validation set with the weights of `step`; return its metrics and some answers to look at.

    The noise is the same at every step, so that two validations differ by their weights alone.
    """
    if not run.validation:
        raise ValueError("there is nothing to validate on: data.val_files is null")
    with run.scorer.generator.awake(run.learner.weights(), step):
        groups = [
            group
            for one in run.validation
            for group in answer(
                run.scorer, one.dataset, one.sampling, run.schedule.val_batch_size, run.progress, "validation"
            )
        ]
    longest = run.validation[0].sampling.max_tokens
    record = reward_metrics(groups, "val/", "_reward") | source_metrics(groups, "val/", "_reward")
    for prefix, share in {
        "val/": groups,
        **{f"val/{name}/": share for name, share in by_source(groups).items()},
    }.items():
        record[f"{prefix}reward_score"] = mean_score(share)
        record |= {f"{prefix}{name}": value for name, value in average_at_k(share).items()}
    record |= {f"val/{name}": value for name, value in length_metrics(groups, longest).items()}
    shown = groups[: run.schedule.val_generations_to_log]
    return record, [
        Generation(g.prompt.id, g.prompt.text, g.responses[0], g.prompt.ground_truth, g.scores[0].value) for g in shown
    ]


def mean_score(groups: Sequence[Group]) -> float:
    """Return the mean over prompts of the mean score of their answers."""
    return fmean(fmean(score.value for score in group.scores) for group in groups)


def average_at_k(groups: Sequence[Group]) -> dict[str, float]:
    """Return `avg@k`, the share of right answers over prompts with k answers each, for each k there is."""
    marks: dict[int, list[float]] = {}
    for group in groups:
        marks.setdefault(len(group.scores), []).append(fmean(is_correct(score) for score in group.scores))
    return {f"avg@{k}": fmean(means) for k, means in sorted(marks.items())}


def answer(
    scorer: Scorer, dataset: Dataset, sampling: SamplingParams, batch_size: int, progress: Progress, what: str
) -> Iterator[Group]:
    """Yield a scored group for every prompt of the dataset, `batch_size` prompts at a time (-1: all at once)."""
    size = len(dataset) if batch_size < 1 else batch_size
    for first in range(0, len(dataset), size):
        rows = range(first, min(first + size, len(dataset)))
        prompts = [prompt for _, prompt in read_prompts(dataset, rows)]
        yield from sample_groups(scorer, prompts, sampling, Stopwatch(), progress, what).values()


def is_correct(score: Score) -> bool:
    """Whether an answer counts as right: by the verifier's `accuracy` if it reports one, else by its value."""
    return score.error is None and score.parts.get("accuracy", score.value) > 0.5


def summarise(groups: Sequence[Group]) -> dict[str, float]:
    """Return what is usually reported of a model, for k = 1, 2, 4, … and all n samples a prompt.

    `accuracy` is the share of right first answers; `avg@n` that of all answers; `pass@k` the unbiased estimate of
    at least one right in k (arXiv 2107.03374, eq. 1); `maj@n` counts a prompt if its most frequent final answer is
    right. Where prompts have different numbers of answers, the first n of each count, n being the smallest. Raises
    ValueError on no groups.
    """
    if not groups:
        raise ValueError("no answers to summarise")
    n = min(len(group.scores) for group in groups)
    groups = [replace(group, responses=group.responses[:n], scores=group.scores[:n]) for group in groups]
    right = [[is_correct(score) for score in group.scores] for group in groups]
    sizes = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    return {
        "accuracy": fmean(marks[0] for marks in right),
        f"avg@{n}": fmean(mark for marks in right for mark in marks),
        **{f"pass@{k}": fmean(pass_at_k(len(marks), sum(marks), k) for marks in right) for k in sizes},
        f"maj@{n}": fmean(majority_is_correct(group) for group in groups),
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the chance that k answers drawn from n, `correct` of them right, hold a right one."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def majority_is_correct(group: Group) -> bool:
    """Whether the final answer that most samples give is right; no answer is no vote, the first of equals wins."""
    answers = [final_answer(response) for response in group.responses]
    votes = Counter(found for found in answers if found is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return is_correct(group.scores[answers.index(winner)])
