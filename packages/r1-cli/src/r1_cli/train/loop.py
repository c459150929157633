"""The training loop: sample groups, score them, compare within each group, update the policy, repeat."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from r1_cli.runs.track.timing import Stopwatch
from r1_cli.train.groups.group import to_samples
from r1_cli.train.metrics.step import (
    count_idle,
    count_skipped,
    divergence,
    mean_of,
    penalty_metrics,
    performance,
    require_rewards,
    require_signal,
    require_updates,
    step_metrics,
)
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import to_generations
from r1_cli.train.run import LOST, Measured, Taken, TrainingRun, finish_step, flush, sample_validation, steps, train
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.sampling.generate import UnscoredError
from r1_cli.train.sampling.weight_check import canary_metrics
from r1_cli.train.types import Collected, Position, Schedule, Teacher, Update, ValueModel, weights_of
from r1_core.needs import OF_POLICY, OF_REFERENCE
from r1_core.objective import Objective
from r1_core.own import OwnCodeError
from r1_core.types import Sample
from r1_rollout.types import Generator

__all__ = ["BrokenStepError", "Run", "finish_step", "flush", "minibatches", "steps", "take_step", "train"]


class BrokenStepError(Exception):
    """A step failed after some of its updates, so it cannot be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(TrainingRun):
    engine: Generator
    collector: DynamicSampling
    update: Update
    validation: Validation | None
    teacher: Teacher | None = None

    def take_step(self, at: Position) -> Taken:
        try:
            return take_step(self, at)
        except UnscoredError as error:
            self.recorder.hold(error.groups)
            raise

    @property
    def validates(self) -> bool:
        return self.validation is not None

    def validate(self, step: int) -> Measured:
        assert self.validation is not None
        return sample_validation(self, self.validation, step)

    def require_progress(self, at: Position) -> None:
        require_signal(at.idle, self.schedule.max_idle_steps)
        require_updates(at.skipped, self.schedule.max_skipped_steps)

    def require_rewards(self, at: Position) -> None:
        require_rewards(at.failed, at.step, self.schedule.max_idle_steps)


def take_step(run: Run, at: Position) -> Taken:
    """Improve the policy once.

    With the default settings this is GRPO (arXiv 2402.03300): sample a group of responses to each prompt, score them,
    compare each with its group, and make the better ones more likely, within a trust region around the policy that
    sampled, and near the reference.
    """
    watch = run.stopwatch()
    update = run.update
    with watch("step"):
        with run.stop.interruptible():
            run.watchdog.begin_step(at.step + 1, partial(run.collector.rows_of, at))
            groups, after, collected = sample(run, at, watch)
            run.watchdog.rows = lambda: [group.row for group in groups]
        run.recorder.hold(groups)  # is recorded if the step fails
        with watch.background("to samples"):
            samples = to_samples(groups)
        with watch("old"):  # log π_old of each token, unless the update's own forward pass gives it
            samples = run.learner.add_logprobs(samples, update.needs & OF_POLICY)
        with watch("ref"):  # log π_ref
            samples = run.learner.add_logprobs(samples, OF_REFERENCE)
        if run.critic:
            with watch("values"):  # V before each token
                run.learner.offload()
                samples = run.critic.add_values(samples)
        with watch("adv"):  # A, for GRPO (r − mean r) / std r over the group
            samples = update.compute_advantages(samples, groups, at.kl.coef)
        if run.teacher:
            with watch("teacher"):  # A + log ν − log π_old, of a teacher ν
                samples = run.teacher.teach(samples, groups)
        kl, updates, forecasts = at.kl, list[dict[str, float]](), list[dict[str, float]]()
        if run.critic:
            with watch("update_critic"):  # descend max((V − G)², (clip(V) − G)²), with G the return
                forecasts = update_critic(run.critic, samples, run.schedule)
        if at.step >= run.schedule.critic_warmup:
            with watch("update_actor"):  # ascend min(ratio · A, clip(ratio) · A) − β KL(π, π_ref), ratio = π / π_old
                objective = replace(update.objective, kl_coef=kl.coef)
                samples, updates = update_policy(run, samples, objective, len(forecasts))
            kl = kl.update(divergence(samples, update.kl_penalty), len(samples))
    with watch.background("metrics"):
        record = collected | step_metrics(at.step, groups, samples)
        record |= mean_of(updates, "actor/") | mean_of(forecasts, "critic/")
        record |= penalty_metrics(samples, update.compute_advantages.kl_penalty, at.kl.coef)
        record |= performance(samples, watch.lap(), run.learner.describe(), run.schedule.ppo_epochs)
        skipped = count_skipped(at, [*updates, *forecasts], run.store.root, run.schedule.max_skipped_steps)
        idle, failed = count_idle(at.idle, at.failed, groups, samples, taught=run.teacher is not None)
        if run.teacher:
            record |= run.teacher.metrics(samples, updates)
            idle = 0 if run.teacher.in_loss else idle
        shown = to_generations(groups[: run.schedule.train_generations_to_log], "train")
    run.recorder.record(at.step + 1, "train", groups, samples)
    at = replace(after, step=at.step + 1, kl=kl, idle=idle, failed=failed, skipped=skipped)
    return Taken(at, record, shown, groups)


def sample(run: Run, at: Position, watch: Stopwatch) -> Collected:
    weights = weights_of(run.learner, at.step)
    if run.async_sampler:
        return run.async_sampler.collect(at, weights, watch)
    with ExitStack() as active:
        with watch("sync"):
            active.enter_context(run.engine.active(weights))
        groups, after, metrics = run.collector.collect(at, watch)
    return groups, after, metrics | canary_metrics(run.engine)


def update_critic(critic: ValueModel, samples: list[Sample], schedule: Schedule) -> list[dict[str, float]]:
    batches = minibatches(samples, schedule.critic_global_batch_size, schedule.critic_ppo_epochs)
    taken = [critic.forward_backward(minibatch) | critic.optim_step() for minibatch in batches]
    critic.offload()
    return taken


def update_policy(
    run: Run, samples: list[Sample], objective: Objective, before: int
) -> tuple[list[Sample], list[dict[str, float]]]:
    """Take the policy's optimizer steps; return the samples with old log-probs, and each step's metrics.

    Raises:
        OwnCodeError: a user's loss failed before any update of the step, of which the critic took `before`.
        BrokenStepError: it failed after one.
    """
    taken: list[dict[str, float]] = []
    try:
        if "old_logprobs" not in run.update.needs:
            samples, metrics = run.learner.forward_backward_on_policy(samples, objective)
            return samples, [metrics | run.learner.optim_step()]
        for minibatch in minibatches(samples, run.schedule.global_batch_size, run.schedule.ppo_epochs):
            taken.append(run.learner.forward_backward(minibatch, objective) | run.learner.optim_step())
    except OwnCodeError as error:
        if not before + len(taken):
            raise
        raise BrokenStepError(f"{error}\n  {before + len(taken)} updates of the step were done: {LOST}") from error
    return samples, taken


def minibatches(samples: Sequence[Sample], prompts: int, epochs: int) -> Iterator[list[Sample]]:
    """Yield the samples of each optimizer step: whole groups, `prompts` at a time, `epochs` times over."""
    groups = samples[-1].group_id + 1
    for _ in range(epochs):
        for first in range(0, groups, prompts):
            yield [s for s in samples if first <= s.group_id < first + prompts]
