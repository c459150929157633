"""The training loop: sample groups, score them, compare within each group, update the policy, repeat."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import Stopped, StopRequest
from r1_cli.hardware import free_memory
from r1_cli.runs.track import Generation, Tracker
from r1_cli.runs.track.timing import Stopwatch, Timeline
from r1_cli.train.groups.advantages import AdvantageError
from r1_cli.train.groups.group import to_samples
from r1_cli.train.groups.stream_position import save_groups
from r1_cli.train.metrics.step import (
    count_idle,
    divergence,
    mean_of,
    penalty_metrics,
    performance,
    require_rewards,
    require_signal,
    step_metrics,
)
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder, to_generations
from r1_cli.train.sampling.async_sampler import AsyncSampler, save_pending_steps
from r1_cli.train.sampling.collect import DynamicSampling
from r1_cli.train.sampling.weight_check import canary_metrics
from r1_cli.train.types import (
    Collected,
    ModelSnapshot,
    Policy,
    Position,
    Schedule,
    Trainable,
    Update,
    ValueModel,
    weights_of,
)
from r1_core.needs import OF_POLICY, OF_REFERENCE
from r1_core.objective import Objective
from r1_core.own import OwnCodeError
from r1_core.types import Sample
from r1_rewards.types import RewardFailure
from r1_rollout.errors import RolloutError
from r1_rollout.types import Generator

# Errors that end a run between two steps, after its last step is saved.
FAILED = (RewardFailure, RolloutError, AdvantageError, OwnCodeError)

LOST = "run the same command again to resume from the last checkpoint, as the last step is lost"

log = logging.getLogger("r1")


class BrokenStepError(Exception):
    """A step failed after some of its updates, so it cannot be saved."""


@dataclass(frozen=True, slots=True)
class Run:
    learner: Policy
    engine: Generator
    collector: DynamicSampling
    update: Update
    schedule: Schedule
    validation: Validation | None
    store: CheckpointStore
    saver: Saver
    tracker: Tracker
    recorder: Recorder  # records every response
    stop: StopRequest
    assets: Callable[[], Mapping[str, bytes]]  # other files of a checkpoint, by path
    critic: ValueModel | None = None
    async_sampler: AsyncSampler | None = None  # samples later steps while the learner computes
    timeline: Timeline = field(default_factory=Timeline)


def train(run: Run, at: Position) -> Position:
    """Train to the end of the schedule; return the position after the last whole step.

    A checkpoint holds the models and the position. If a signal, a reward, an engine or an estimator ends the run, the
    last whole step is saved first.
    """
    try:
        if run.validation and run.schedule.val_before_train and not run.tracker.has(at.step):
            with run.stop.interruptible():
                run.tracker.log(at.step, *validate(run, run.validation, at.step))
        while at.step < run.schedule.last_step:
            with run.timeline.step(at.step + 1):
                at, record, generations = take_step(run, at)
                finish_step(run, at, record, generations)
            require_signal(at.idle, run.schedule.max_idle_steps)
            run.saver.check()
            run.stop.check()
        flush(run)
        run.saver.finish()
        require_rewards(at.failed, at.step, run.schedule.max_idle_steps)
    except (Stopped, *FAILED) as reason:
        stop_early(run, at, reason)
        if not isinstance(reason, Stopped):
            raise
    except Exception:
        run.saver.finish_or_warn()  # earlier checkpoints stay
        raise
    return at


def stop_early(run: Run, at: Position, reason: Exception) -> None:
    """Save the last whole step, unless groups sampled for the next steps are lost."""
    lost, why = False, f"{reason}: " if isinstance(reason, Stopped) else ""  # the caller reports errors
    try:
        if run.async_sampler:
            run.async_sampler.drain()
    except FAILED:
        lost = True
    run.saver.finish_or_warn()
    if lost:
        log.warning("%sstopping after step %d; %s (%s)", why, at.step, LOST, run.store.latest() or "there is none")
        return
    log.warning("%sstopping after step %d, which is saved in %s", why, at.step, run.store.path(at.step))
    if at.step not in run.store.steps():
        write_checkpoint(run, at, {})
        run.saver.publish(partial(flush, run))
        run.saver.finish()


def take_step(run: Run, at: Position) -> tuple[Position, dict[str, float], list[Generation]]:
    """Improve the policy once; return the new position, the step's metrics, and some responses to log.

    With the default settings this is GRPO (arXiv 2402.03300): sample a group of responses to each prompt, score them,
    compare each with its group, and make the better ones more likely, within a trust region around the policy that
    sampled, and near the reference.
    """
    watch = Stopwatch(run.tracker.console.stage, run.timeline.record)
    update = run.update
    with watch("step"):
        with run.stop.interruptible():
            groups, after, collected = sample(run, at, watch)
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
        idle, failed = count_idle(at.idle, at.failed, groups, samples)
        shown = to_generations(groups[: run.schedule.train_generations_to_log], "train")
    run.recorder.record(at.step + 1, "train", groups, samples)
    return replace(after, step=at.step + 1, kl=kl, idle=idle, failed=failed), record, shown


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


def validate(run: Run, validation: Validation, step: int) -> tuple[dict[str, float], list[Generation]]:
    if run.async_sampler:
        run.async_sampler.drain()
    with run.engine.active(weights_of(run.learner, step)):
        record, groups = validation.measure()
    run.recorder.record(step, "validation", groups)
    return record, to_generations(groups[: validation.shown], "val")


def finish_step(run: Run, at: Position, record: dict[str, float], generations: list[Generation]) -> None:
    """Validate, save and log. The checkpoint and the record are written while the next step runs.

    A checkpoint is published after the record, so that a resumed run has the records of all its steps.
    """
    watch = Stopwatch(run.tracker.console.stage, run.timeline.record)
    if run.validation and run.schedule.validates(at.step):
        try:
            with watch("validation"):
                scores, responses = validate(run, run.validation, at.step)
        except FAILED:
            run.tracker.log(at.step, record, generations)
            raise
        record |= scores
        generations = [*responses, *generations]
    saves = run.schedule.saves(at.step)
    if saves:
        with watch("save_checkpoint"):
            write_checkpoint(run, at, record)
    record |= {f"timing_s/{stage}": seconds for stage, seconds in watch.lap().items()}
    with watch.background("log"):
        run.tracker.log(at.step, record, generations)
    if saves:
        run.saver.publish(partial(flush, run))


def flush(run: Run) -> None:
    """Wait until all metrics and samples are written. Raises CheckpointError if a record could not be written."""
    run.tracker.flush()
    run.recorder.flush()


def write_checkpoint(run: Run, at: Position, record: dict[str, float]) -> None:
    """Snapshot the state and write it in the background, or now if there is no memory for a snapshot."""
    run.saver.finish()
    model_only = run.schedule.save_model_only
    models: dict[str, Trainable] = {"actor": run.learner} | ({"critic": run.critic} if run.critic else {})
    copies: dict[str, ModelSnapshot | None] = {}
    for name, model in models.items():
        copies[name] = model.snapshot(model_only=model_only, max_bytes=free_memory() // 2)
        if run.critic:  # the two are never on the device together
            model.offload()
    pending, assets = run.async_sampler.pending() if run.async_sampler else [], run.assets()

    def save(folder: Path) -> None:
        for name, model in models.items():
            if (copy := copies[name]) is not None:
                copy.write(folder / name)
            else:
                model.save(folder / name, model_only=model_only)
                model.offload()
        for place, content in assets.items():
            (folder / place).write_bytes(content)
        save_groups(at.stream.carried_over, folder)
        save_pending_steps([step.result() for step in pending], folder)

    state = {**at.state(), "val_reward_score": record.get("val/reward_score"), "model_only": model_only}
    run.saver.write(at.step, save, state, apart=None not in copies.values())
