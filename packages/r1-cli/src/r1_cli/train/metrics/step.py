"""Metrics of a step, under the names that EasyR1 and veRL dashboards use, and whether it has a learning signal."""

import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import psutil
import torch

from r1_cli.hardware import peak_flops
from r1_cli.train.groups.group import Group, paths_of
from r1_cli.train.types import Position
from r1_core import kl
from r1_core.learner.pack import SharedPrompts
from r1_core.learner.trainable import LearnerInfo
from r1_core.losses import correction
from r1_core.types import Sample, known, rows, tokens, trained
from r1_rewards.types import RewardFailure

if TYPE_CHECKING:
    from r1_cli.train.groups.trajectory import Call, Trajectory

# Samples that are looked at in one go: what is computed of them stays in the processor's cache, of a step it would not.
SHARE = 32
OF_ALL_TOKENS = ("old", "ref", "values", "adv", "update_critic", "update_actor")  # stages that read prompts, too


log = logging.getLogger("r1")


def step_metrics(step: int, groups: Sequence[Group], samples: Sequence[Sample]) -> dict[str, float]:
    return {
        **reward_metrics(groups),
        **source_metrics(groups, "reward/"),
        "reward/groups_without_variance": fmean([len(set(group.rewards)) <= 1 for group in groups]),
        **spread("critic/score", [score.value for group in groups for score in group.scores]),
        **spread("critic/rewards", [s.reward for i, s in enumerate(samples) if s.episode_id in (-1, i)]),
        **advantage_metrics(samples),
        **length_metrics(groups),
        **staleness(step, groups, samples),
        **episode_metrics([episode for group in groups for episode in group.episodes]),
    }


def episode_metrics(episodes: "Sequence[Trajectory]") -> dict[str, float]:
    """Return `episode/…`, `tool/NAME/…` and `timing_s/tool/NAME/…`; shares and means are of episodes."""
    if not episodes:
        return {}
    turns = [sum(len(path.assistant_turns) for path in episode.paths) for episode in episodes]
    calls = [call for episode in episodes for call in episode.calls]
    lengths = sum(len(path.token_ids) for episode in episodes for path in episode.paths)
    stops = Counter(episode.stop_reason for episode in episodes)
    return {
        "episode/turns/mean": fmean(turns),
        "episode/turns/max": float(max(turns)),
        "episode/calls": len(calls) / len(episodes),
        "episode/forks": fmean(len(episode.forks) for episode in episodes),
        "episode/pictures": fmean(len(episode.images) for episode in episodes),
        "episode/sampled_share": sum(episode.sampled_length for episode in episodes) / max(lengths, 1),
        **{f"episode/stop/{reason}": count / len(episodes) for reason, count in sorted(stops.items())},
        **_tool_metrics(calls),
    }


def _tool_metrics(calls: "Sequence[Call]") -> dict[str, float]:
    by_tool: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_tool[call.tool].append(call)
    found: dict[str, float] = {}
    for tool, made in sorted(by_tool.items()):
        found |= {
            f"tool/{tool}/calls": float(len(made)),
            f"tool/{tool}/failures": float(sum(bool(call.error) for call in made)),
            f"timing_s/tool/{tool}/mean": fmean(call.seconds for call in made),
            f"timing_s/tool/{tool}/max": max(call.seconds for call in made),
            f"tool/{tool}/truncated": float(sum(call.truncated > 0 for call in made)),
        }
    return found


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return mean, max and min. Example: `spread("x", [1, 3]) == {"x/mean": 2, "x/max": 3, "x/min": 1}`."""
    values = list(map(float, values))
    return {f"{name}/mean": fmean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def mean_of(records: Sequence[Mapping[str, float]], prefix: str = "", suffix: str = "") -> dict[str, float]:
    """Return the mean of each number over the records that have it."""
    columns: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            columns[name].append(value)
    return {f"{prefix}{name}{suffix}": fmean(values) for name, values in columns.items()}


def reward_metrics(groups: Sequence[Group], prefix: str = "reward/", suffix: str = "") -> dict[str, float]:
    """Return the mean of each reward part, failures by cause, and unusable ground truths. Prompts have equal weight."""
    means, failures, unusable = list[dict[str, float]](), Counter[str](), 0
    for group in groups:
        means.append(mean_of([response.score.parts for response in group.responses]))
        failures.update(score.error.cause for score in (*group.scores, *group.dropped) if score.error)
        unusable += group.truth_problem is not None
    record = mean_of(means, prefix, suffix)
    for cause, count in failures.items():
        record[f"{prefix}failures/{cause}"] = float(count)
    return record | {f"{prefix}failures": float(failures.total()), f"{prefix}unusable_truths": float(unusable)}


def by_source(groups: Sequence[Group]) -> dict[str, list[Group]]:
    shares: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        shares[group.data_source].append(group)
    return dict(shares) if len(shares) > 1 else {}


def source_metrics(groups: Sequence[Group], prefix: str, suffix: str = "") -> dict[str, float]:
    """Return the mean rewards of each source, `{prefix}{source}/{part}`, and its number of prompts."""
    record: dict[str, float] = {}
    for source, share in by_source(groups).items():
        record |= reward_metrics(share, f"{prefix}{source}/", suffix)
        record[f"{prefix}{source}/prompts"] = float(len(share))
    return record


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the spread of advantages, returns and values over trained tokens, and the variance that values explain.

    Outcome estimators have no returns; advantages replace them.
    """
    found = {"advantages": tokens(samples, "advantages")}
    found["returns"] = tokens(samples, "returns") if known(samples, "returns") else found["advantages"]
    record: dict[str, float] = {}
    if known(samples, "values"):
        found["values"] = tokens(samples, "values")
        errors = found["returns"].double() - found["values"]
        unexplained, whole = errors.var(unbiased=False), found["returns"].double().var(unbiased=False)
        record["critic/vf_explained_var"] = float(torch.where(whole > 0, 1 - unexplained / whole, 0.0))
    for name, values in found.items():
        mean = float(values.mean(dtype=torch.float64))
        record |= {f"critic/{name}/mean": mean, f"critic/{name}/max": float(values.max())}
        record[f"critic/{name}/min"] = float(values.min())
    return record


def length_metrics(groups: Sequence[Group]) -> dict[str, float]:
    completions = [completion for group in groups for completion in group.completions]
    return {
        **spread("response_length", [c.sampled_length for c in completions]),
        "response_length/clip_ratio": fmean([c.finish_reason == "length" for c in completions]),
        **spread("prompt_length", [len(group.prompt.token_ids) for group in groups]),
    }


def sequence_balance(lengths: Sequence[int], loads: Sequence[int] = ()) -> dict[str, float]:
    """Return EasyR1's `global_seqlen/*`: tokens per rank, as computed (`balanced_*`) and as split in order.

    Args:
        lengths: tokens of each sample; a shared prompt counts in its first sample only.
        loads: tokens that each rank computed, perhaps several times.
    """
    total, ranks = sum(lengths), max(len(loads), 1)
    ends = [len(lengths) * rank // ranks for rank in range(ranks + 1)]
    plain = [float(sum(lengths[start:end])) for start, end in pairwise(ends)]
    balanced = [load * total / sum(loads) for load in loads] if sum(loads) else plain
    return {
        "global_seqlen/mean": total / ranks,
        "global_seqlen/max": max(plain),
        "global_seqlen/min": min(plain),
        "global_seqlen/minmax_diff": max(plain) - min(plain),
        "global_seqlen/balanced_max": max(balanced),
        "global_seqlen/balanced_min": min(balanced),
    }


def staleness(step: int, groups: Sequence[Group], samples: Sequence[Sample]) -> dict[str, float]:
    """Return the responses' age in weight versions, and `agreement` on current and older ones.

    `rollout/stale_*` also includes what the policy has learned since the responses were sampled.
    """
    completions = [completion for group in groups for completion in group.completions]
    ages = [step - path.weight_version for completion in completions for path in paths_of(completion)]
    fresh = [sample for sample, age in zip(samples, ages, strict=True) if age <= 0]
    stale = [sample for sample, age in zip(samples, ages, strict=True) if age > 0]
    return {
        **spread("staleness", ages),
        **agreement(fresh, "rollout/"),
        **agreement(stale, "rollout/stale_"),
    }


def agreement(samples: Sequence[Sample], prefix: str = "rollout/") -> dict[str, float]:
    """Return how far the engine's log-probs are from the learner's, over trained tokens, before any correction.

    Gaps in nats, KL(engine, learner) by k1 and k3, the χ² divergence, and the effective sample size of the importance
    weights (1 if both agree). {} without log-probs.
    """
    if not samples or not known(samples, "old_logprobs") or not known(samples, "rollout_logprobs"):
        return {}
    parts, widest = [], []
    for start in range(0, len(samples), SHARE):
        share = samples[start : start + SHARE]
        gap = (tokens(share, "old_logprobs") - tokens(share, "rollout_logprobs")).double()[None]
        mask = torch.ones_like(gap, dtype=torch.bool)
        weights, found = correction.importance_weights(gap, mask, "token"), correction.diagnose(gap, mask)
        widest.append(found.pop("rollout_gap_max"))
        means = torch.stack([*found.values()])
        parts.append(torch.cat([means * gap.numel(), torch.stack([weights.sum(), weights.square().sum(), mask.sum()])]))
    sums = torch.stack(parts).sum(0)
    weights, squares, count = sums[-3:]
    mean, kl_k1, kl_k3, chi2 = (sums[:-3] / count.clamp(min=1)).tolist()
    return {
        f"{prefix}logprob_gap_mean": mean,
        f"{prefix}logprob_gap_max": float(torch.stack(widest).max()),
        f"{prefix}kl": kl_k1,
        f"{prefix}kl_k3": kl_k3,
        f"{prefix}chi2": chi2,
        f"{prefix}effective_sample_size": float(torch.where(squares == 0, 1.0, weights**2 / (squares * count))),
    }


def penalty_metrics(samples: Sequence[Sample], kl_penalty: str | None, coef: float) -> dict[str, float]:
    return {} if kl_penalty is None else {"critic/kl": divergence(samples, kl_penalty), "critic/kl_coef": coef}


def divergence(samples: Sequence[Sample], kl_penalty: str | None) -> float:
    """Return the policy's mean token KL from the reference per response, in nats; 0 without a penalty.

    By the penalty's estimator, so that a KL controller steers what it measures; by k1, which is unbiased, for a
    full-vocabulary KL in the loss.
    """
    if kl_penalty is None or not known(samples, "ref_logprobs") or not known(samples, "old_logprobs"):
        return 0.0
    exact = kl_penalty == kl.FULL and known(samples, "full_kl")
    estimate = kl.k1 if kl_penalty == kl.FULL else kl.get(kl_penalty)
    total, sequences = 0.0, 0
    for start in range(0, len(samples), SHARE):
        share = samples[start : start + SHARE]
        mask = trained(share)
        if exact:
            values = rows(share, "full_kl")
        else:
            values = estimate(*(rows(share, name).double() for name in ("old_logprobs", "ref_logprobs")))
        present = int(mask.any(-1).sum())
        total, sequences = total + present * kl.sequence_mean(values, mask), sequences + present
    return total / max(sequences, 1)


def performance(
    samples: Sequence[Sample], seconds: Mapping[str, float], info: LearnerInfo, ppo_epochs: int
) -> dict[str, float]:
    """Return times, throughput and memory; MFU for devices with a known peak. A shared prompt is counted once."""
    lengths = SharedPrompts.find(samples, info.share_prompts).in_order(range(len(samples)))
    total = sum(lengths)
    sampled = sum(sample.response_length for sample in samples)
    tokens_of = {"gen": sampled, "reward": sampled, **dict.fromkeys(OF_ALL_TOKENS, total)}
    record = {
        "perf/total_num_tokens": float(total),
        "perf/micro_batch_size": float(info.micro_batch),
        "perf/time_per_step": seconds["step"],
        "perf/samples_per_second": len(samples) / seconds["step"],
        "perf/throughput": total / (seconds["step"] * info.devices),
        **sequence_balance(lengths, info.tokens),
        "perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30,
    }
    for stage, value in seconds.items():
        record[f"timing_s/{stage}"] = value
        if stage in tokens_of:
            record[f"timing_per_token_ms/{stage}"] = 1000 * value / tokens_of[stage]
    peak = peak_flops(info.device)
    if peak is not None and "update_actor" in seconds:
        flops = total * ppo_epochs * info.flops_per_token
        record["perf/mfu_actor"] = flops / (seconds["update_actor"] * peak * info.devices)
    if info.devices > 1:
        record["perf/straggler"] = info.straggler
    if info.peak_allocated is not None and info.peak_reserved is not None:
        record["perf/max_memory_allocated_gb"] = info.peak_allocated / 2**30
        record["perf/max_memory_reserved_gb"] = info.peak_reserved / 2**30
    return record


class NothingToLearn(RewardFailure):
    """No step had a learning signal."""


def count_idle(
    idle: int, failed: int, groups: Sequence[Group], samples: Sequence[Sample], *, taught: bool = False
) -> tuple[int, int]:
    """Return how many steps in a row, including this one, had no signal, and in how many all rewards failed.

    A step has no signal if no response could be scored, or if all advantages are 0. Single steps of the second kind are
    common in small batches, so logging starts with the second in a row. `taught`: a teacher makes the advantages.
    """
    scores = [score for group in groups for score in (*group.scores, *group.dropped)]
    errors = [score.error for score in scores if score.error]
    all_failed = len(errors) == len(scores)
    if all_failed:
        first = errors[0]
        why = f"the reward failed on all {len(scores)} responses, on the first by {first.cause}: {first.message}"
    elif any(sample.advantages is not None and bool(sample.advantages.any()) for sample in samples):
        return 0, 0
    elif taught:
        why = "the teacher finds all tokens as likely as the policy does, or gave no log-prob: is it the policy itself?"
    elif len(rewards := {reward for group in groups for reward in group.rewards}) == 1:
        why = f"all {len(samples)} rewards are {rewards.pop():g}, so that every advantage is 0"
    else:
        why = f"rewards differ between the {len(groups)} groups, within none, so that every advantage is 0"
    if all_failed or idle:
        log.warning("nothing to learn from, %d step(s) in a row: %s", idle + 1, why)
    return idle + 1, failed + 1 if all_failed else 0


def require_signal(idle: int, limit: int) -> None:
    """Raise NothingToLearn after `limit` steps in a row without signal; never if it is below 1."""
    if 0 < limit <= idle:
        raise NothingToLearn(
            f"{idle} steps in a row had nothing to learn from, see the warnings above. Test the reward with r1 reward "
            "test (is it constant? is its sign right?), run r1 diagnose, read generations.jsonl. Make the task easier "
            "(or harder, if all is correct) or the groups larger. trainer.max_idle_steps=-1 switches this check off"
        )


def count_skipped(at: Position, updates: Sequence[Mapping[str, float]], folder: Path, limit: int) -> int:
    """Return how many steps in a row, including this one, skipped an update; log the first.

    Args:
        at: the position before the step.
        updates: metrics of the step's optimizer steps.
        folder: that of the run.
        limit: how many end the run; below 1: none do.
    """
    if all(isfinite(one.get("grad_norm", 0.0)) for one in updates):
        return 0
    if not at.skipped:
        ends = (
            f"{limit} such steps in a row end the run (trainer.max_skipped_steps)" if limit > 0 else "the run goes on"
        )
        log.warning(
            "step %d: an update was skipped, as its loss or gradient was not finite. The step's samples are kept: "
            "r1 replay %s --step %d --debug. %s",
            at.step + 1, shlex.quote(str(folder)), at.step + 1, ends,
        )  # fmt: skip
    return at.skipped + 1


def require_updates(skipped: int, limit: int) -> None:
    """Raise NothingToLearn after `limit` skipped steps in a row; never if it is below 1."""
    if 0 < limit <= skipped:
        raise NothingToLearn(
            f"the loss or gradient of {skipped} steps in a row was not finite, see the warnings above: lower "
            "worker.actor.optim.lr, or look at the model's weights and at the loss. trainer.max_skipped_steps=-1 "
            "switches this check off"
        )


def require_rewards(failed: int, steps: int, limit: int) -> None:
    """Raise NothingToLearn if all rewards of all steps failed; never if `limit` is below 1."""
    if 0 < steps <= failed and limit > 0:
        raise NothingToLearn(
            f"no step learned anything: the reward failed on every response of all {steps} steps, see the warnings "
            "above; the weights have not changed. Test the reward by itself: r1 reward test"
        )
