"""Validation: sample the validation rows with the current weights, and measure them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import Group
from r1_cli.train.metrics.step import by_source, length_metrics, reward_metrics, source_metrics
from r1_cli.train.sampling.generate import render_prompts, sample_groups
from r1_cli.train.types import Dataset, Progress, Sampler
from r1_rollout.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ValidationSet:
    dataset: Dataset
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Validation:
    sampler: Sampler
    sets: Sequence[ValidationSet]
    batch_size: int  # prompts sampled at once; -1: all
    shown: int  # prompts whose responses are logged
    progress: Progress

    def measure(self) -> tuple[dict[str, float], list[Group]]:
        """Sample with the engine's current weights; return metrics and groups. The noise is the same at every step."""
        groups = self.sample("validation")
        record = reward_metrics(groups, "val/", "_reward") | source_metrics(groups, "val/", "_reward")
        for prefix, share in {
            "val/": groups,
            **{f"val/{name}/": share for name, share in by_source(groups).items()},
        }.items():
            record[f"{prefix}reward_score"] = mean_score(share)
            record |= {f"{prefix}{name}": value for name, value in average_at_k(share).items()}
        record |= {f"val/{name}": value for name, value in length_metrics(groups).items()}
        return record, groups

    def sample(self, what: str) -> list[Group]:
        groups: list[Group] = []
        for one in self.sets:
            rows = range(len(one.dataset))
            size = len(rows) if self.batch_size < 1 else self.batch_size
            for first in range(0, len(rows), size):
                prompts = [prompt for _, prompt in render_prompts(one.dataset, rows[first : first + size])]
                one.dataset.prefetch(rows[first + size : first + 2 * size])
                groups += sample_groups(self.sampler, prompts, one.sampling, Stopwatch(), self.progress, what).values()
        return groups


def mean_score(groups: Sequence[Group]) -> float:
    return fmean(fmean(score.value for score in group.scores) for group in groups)


def average_at_k(groups: Sequence[Group]) -> dict[str, float]:
    """Return `avg@k`, the share of correct responses over prompts with k responses."""
    marks: dict[int, list[float]] = {}
    for group in groups:
        marks.setdefault(len(group.scores), []).append(fmean(score.is_correct for score in group.scores))
    return {f"avg@{k}": fmean(means) for k, means in sorted(marks.items())}
