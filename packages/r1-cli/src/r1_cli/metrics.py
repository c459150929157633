"""The numbers of a step under the names that dashboards of EasyR1 and veRL already know."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import psutil
import torch

from r1_cli.collect import Batch
from r1_cli.roles import Run
from r1_cli.samples import Group
from r1_core.types import Sample


def step_metrics(run: Run, batch: Batch, samples: Sequence[Sample], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return everything but the update's own metrics."""
    tokens = [len(sample.token_ids) for sample in samples]
    return {
        **{f"timing_s/{stage}": value for stage, value in seconds.items()},
        **reward_metrics(batch.groups),
        **spread("critic/score", [sample.reward for sample in samples]),
        **spread("critic/rewards", [sample.reward for sample in samples]),
        **advantage_metrics(samples),
        **length_metrics(batch.groups, run.sampling.max_tokens),
        **agreement(samples),
        **spread("global_seqlen", tokens),
        "rollout/groups_sampled": float(batch.sampled),
        "rollout/groups_trained": float(len(batch.groups)),
        **performance(run, sum(tokens), seconds),
    }


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return mean, max and min. Example: `spread("x", [1, 3]) == {"x/mean": 2, "x/max": 3, "x/min": 1}`."""
    values = [float(value) for value in values]
    return {f"{name}/mean": fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def mean_of(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps that report it."""
    columns: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            columns[name].append(value)
    return {name: fmean(values) for name, values in columns.items()}


def update_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over the step's optimizer steps of what the learner reported."""
    return {f"actor/{name}": value for name, value in mean_of(updates).items()}


def reward_metrics(groups: Sequence[Group], prefix: str = "reward/", suffix: str = "") -> dict[str, float]:
    """Return the mean of each part of the rewards, and how many answers could not be scored, by cause."""
    scores = [score for group in groups for score in group.scores]
    record = {f"{prefix}{name}{suffix}": value for name, value in mean_of([s.parts for s in scores]).items()}
    failures = Counter(score.error.cause for score in scores if score.error)
    record |= {f"{prefix}failures/{cause}": float(count) for cause, count in failures.items()}
    return record | {f"{prefix}failures": float(failures.total())}


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the spread over trained tokens; outcome estimators use the advantage as the return."""
    values = torch.cat([s.advantages[s.loss_mask] for s in samples if s.advantages is not None]).tolist()
    return spread("critic/advantages", values) | spread("critic/returns", values)


def length_metrics(groups: Sequence[Group], max_tokens: int) -> dict[str, float]:
    """Return lengths in tokens, and the share of answers that were cut at `max_tokens`."""
    completions = [completion for group in groups for completion in group.completions]
    return {
        **spread("response_length", [len(c.token_ids) for c in completions]),
        "response_length/clip_ratio": fmean(c.finish_reason == "length" for c in completions),
        **spread("prompt_length", [len(group.prompt.token_ids) for group in groups]),
    }


def agreement(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how far the engine's log-probs lie from the learner's, over trained tokens.

    The effective sample size, (Σw)² / (N Σw²) with w = exp(learner − engine), is 1 where they agree.
    """
    gap = torch.cat(
        [
            (s.old_logprobs - s.rollout_logprobs)[s.loss_mask]
            for s in samples
            if s.old_logprobs is not None and s.rollout_logprobs is not None
        ]
    ).double()
    weights = gap.clamp(-20, 20).exp()
    return {
        "rollout/logprob_gap_mean": float(gap.abs().mean()),
        "rollout/logprob_gap_max": float(gap.abs().max()),
        "rollout/effective_sample_size": float(weights.sum() ** 2 / (len(weights) * weights.square().sum())),
    }


def divergence(samples: Sequence[Sample]) -> float:
    """Return the mean over answers of the policy's token KL from the reference (k1, nats); 0 without a reference."""
    gaps = [
        (s.old_logprobs - s.ref_logprobs)[s.loss_mask].double().mean()
        for s in samples
        if s.old_logprobs is not None and s.ref_logprobs is not None and s.loss_mask.any()
    ]
    return float(torch.stack(gaps).mean()) if gaps else 0.0


def performance(run: Run, tokens: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return throughput and memory; MFU only where the device's peak is known, never a made-up one."""
    record = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds["step"],
        "perf/throughput": tokens / seconds["step"],
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    if run.device_peak_flops:
        updated = tokens * run.schedule.ppo_epochs
        record["perf/mfu_actor"] = updated * run.flops_per_token / (seconds["update_actor"] * run.device_peak_flops)
    if torch.cuda.is_available():
        record["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        record["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return record
