"""The training loop: sample, score, compare, update, repeat."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from r1_cli.groups.group import to_samples
from r1_cli.groups.supply import save_surplus
from r1_cli.measure.metrics import divergence, step_metrics, update_metrics
from r1_cli.measure.validate import validate
from r1_cli.roles import Position, Run, Schedule
from r1_cli.sampling.collect import collect
from r1_cli.state.checkpoints import Draft
from r1_cli.state.stop import Stopped
from r1_cli.track import Generation
from r1_cli.track.stopwatch import Stopwatch
from r1_core.needs import OF_POLICY, OF_REFERENCE
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_rewards.types import RewardFailure
from r1_rollout.canary import StaleWeights
from r1_rollout.errors import EngineError
from r1_rollout.vllm.client import ServerError

# What ends a run between two steps, where the learner is whole: its last step is saved before.
SAMPLING_FAILED = (RewardFailure, StaleWeights, EngineError, ServerError)

log = logging.getLogger("r1")


def train(run: Run, at: Position) -> Position:
    """Train from a position to the schedule's end; return the last whole step's position.

    With the learner's own state, a position is all that a checkpoint holds: everything else is a function of it. One is
    written, too, where a signal, a reward or an engine ends the run.
    """
    try:
        if run.validation and run.schedule.val_before_train and not run.tracker.has(at.step):
            with run.stop.interruptible():
                run.tracker.log(at.step, *validate(run, at.step))
        while at.step < run.schedule.total_steps:
            at, record = take_step(run, at)
            conclude_step(run, at, record)
            run.stop.check()
    except (Stopped, *SAMPLING_FAILED) as request:
        log.warning("%s: leaving after step %d", request, at.step)
        if at.step not in run.store.steps():
            run.store.publish(write_checkpoint(run, at, {}))
        if not isinstance(request, Stopped):
            raise
    return at


def take_step(run: Run, at: Position) -> tuple[Position, dict[str, float]]:
    """Improve the policy once; return the new position and the step's metrics."""
    watch = Stopwatch(run.tracker.stage)
    with watch("step"):
        with run.stop.interruptible(), run.scorer.generator.awake(run.learner.weights(), at.step):
            batch = collect(run, at, watch)
        groups, rewards = run.shaping.finish(batch.groups, at.rewards)
        samples = to_samples(groups)
        with watch("old"):
            samples = run.learner.annotate(samples, run.needs & OF_POLICY)
        with watch("ref"):
            samples = run.learner.annotate(samples, OF_REFERENCE)
        with watch("adv"):
            samples = run.estimate(samples, groups, at.kl.coef)
        with watch("update_actor"):
            samples, updates = update(run, samples, replace(run.objective, kl_coef=at.kl.coef))
    record = step_metrics(run, at, batch, samples, watch.lap()) | update_metrics(updates)
    kl = at.kl.update(divergence(samples), len(samples))
    return Position(at.step + 1, batch.supply, kl, batch.next_filter, rewards), record


def update(run: Run, samples: list[Sample], objective: Objective) -> tuple[list[Sample], list[dict[str, float]]]:
    """Take the optimizer steps; return the samples with their old log-probs, and the metrics of each step."""
    if "old_logprobs" not in run.needs:
        samples, metrics = run.learner.forward_backward_on_policy(samples, objective)
        return samples, [metrics | run.learner.optim_step()]
    return samples, [
        run.learner.forward_backward(minibatch, objective) | run.learner.optim_step()
        for minibatch in minibatches(samples, run.schedule)
    ]


def conclude_step(run: Run, at: Position, record: dict[str, float]) -> None:
    """Validate, save and log.

    The record is written between the checkpoint's writing and its publication: whichever moment a kill chooses, a
    resumed run finds the records of all steps up to its checkpoint.
    """
    watch = Stopwatch(run.tracker.stage)
    generations: list[Generation] = []
    if run.validation and run.schedule.validates(at.step):
        try:
            with watch("validation"):
                scores, generations = validate(run, at.step)
        except SAMPLING_FAILED:
            run.tracker.log(at.step, record)
            raise
        record |= scores
    draft = None
    if run.schedule.saves(at.step):
        with watch("save_checkpoint"):
            draft = write_checkpoint(run, at, record)
    record |= {f"timing_s/{stage}": seconds for stage, seconds in watch.lap().items()}
    run.tracker.log(at.step, record, generations)
    if draft:
        run.store.publish(draft)


def minibatches(samples: Sequence[Sample], schedule: Schedule) -> Iterator[list[Sample]]:
    """Yield the samples of each optimizer step: whole groups, `global_batch_size` at a time, `ppo_epochs` times."""
    groups = samples[-1].group_id + 1
    for _ in range(schedule.ppo_epochs):
        for first in range(0, groups, schedule.global_batch_size):
            yield [s for s in samples if first <= s.group_id < first + schedule.global_batch_size]


def write_checkpoint(run: Run, at: Position, record: dict[str, float]) -> Draft:
    """Write everything that a resume needs, unpublished."""

    def save(folder: Path) -> None:
        run.learner.save(folder / "actor", model_only=run.schedule.save_model_only)
        run.save_assets(folder / "actor")
        save_surplus(at.supply.surplus, folder)

    state = {
        **at.state(),
        "val_reward_score": record.get("val/reward_score"),
        "model_only": run.schedule.save_model_only,
    }
    return run.store.write(at.step, save, state)
