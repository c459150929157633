"""What a run does around its steps, whatever a step is: validate, save, log, publish, stop."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.memory import MemorySaver
from r1_cli.checkpoint.saving import Saver
from r1_cli.checkpoint.stop import Stopped, StopRequest
from r1_cli.faults.watchdog import Watchdog
from r1_cli.hardware import free_memory
from r1_cli.runs.track import Generation, Tracker
from r1_cli.runs.track.timing import Stopwatch, Timeline
from r1_cli.train.groups.advantages import AdvantageError
from r1_cli.train.groups.group import Group
from r1_cli.train.groups.stream_position import save_stream
from r1_cli.train.metrics.validate import Validation
from r1_cli.train.recorder import Recorder, to_generations
from r1_cli.train.sampling.async_sampler import AsyncSampler, save_pending_steps
from r1_cli.train.types import ModelSnapshot, Policy, Position, Schedule, Trainable, ValueModel, weights_of
from r1_core.own import OwnCodeError
from r1_data.types import DataError
from r1_rewards.types import RewardFailure
from r1_rollout.errors import RolloutError

# Errors that end a run between two steps, after its last step is saved.
FAILED = (RewardFailure, RolloutError, AdvantageError, OwnCodeError, DataError)

LOST = "run the same command again to resume from the last checkpoint, as the last step is lost"
Measured = tuple[dict[str, float], list[Generation]]  # metrics, and some responses to log

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken."""

    at: Position  # after it
    metrics: dict[str, float]
    shown: list[Generation]  # some responses to log
    groups: Sequence[Group] = ()  # that it trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run. A subclass says what a step and a validation are."""

    learner: Policy
    schedule: Schedule
    store: CheckpointStore
    saver: Saver
    tracker: Tracker
    recorder: Recorder  # records every response
    stop: StopRequest
    assets: Callable[[], Mapping[str, bytes]]  # other files of a checkpoint, by path
    critic: ValueModel | None = None
    async_sampler: AsyncSampler | None = None  # samples later steps while the learner computes
    timeline: Timeline = field(default_factory=Timeline)
    copies: MemorySaver | None = None  # of the state, in memory
    watchdog: Watchdog = field(default_factory=Watchdog)

    def stopwatch(self) -> Stopwatch:
        """Return a new stopwatch whose stages the console shows, the timeline records and the watchdog watches."""

        def begun(stage: str) -> None:
            self.tracker.console.stage(stage)
            self.watchdog.begun(stage)

        def ended(stage: str, begin: float, end: float) -> None:
            self.timeline.record(stage, begin, end)
            self.watchdog.ended(stage, begin, end)

        return Stopwatch(begun, ended)

    @abstractmethod
    def take_step(self, at: Position) -> Taken:
        """Take one step from this position."""

    @property
    @abstractmethod
    def validates(self) -> bool: ...

    @abstractmethod
    def validate(self, step: int) -> Measured:
        """Measure the current weights. Called only if `validates`."""

    @abstractmethod
    def require_progress(self, at: Position) -> None:
        """Raise NothingToLearn if the latest steps changed nothing."""

    def require_rewards(self, at: Position) -> None:
        """Raise NothingToLearn at the end if no step had a reward."""


def train(run: TrainingRun, at: Position) -> Position:
    """Train to the end of the schedule; return the position after the last whole step."""
    for taken in steps(run, at):
        at = taken.at
        del taken  # the groups, which would stay in memory during the next step
    return at


def steps(run: TrainingRun, at: Position) -> Iterator[Taken]:
    """Take the steps of the schedule; yield each when it is logged.

    A checkpoint holds the models and the position. If a signal, a reward, an engine or an estimator ends the run, the
    last whole step is saved first; so it is if the caller throws `Stopped` at a yielded step.
    """
    try:
        if run.validates and run.schedule.val_before_train and not run.tracker.has(at.step):
            with run.stop.interruptible():
                run.tracker.log(at.step, *run.validate(at.step))
        while at.step < run.schedule.last_step:
            with run.timeline.step(at.step + 1):
                taken = run.take_step(at)
                at = taken.at
                finish_step(run, taken)
            yield taken
            del taken
            run.require_progress(at)
            run.saver.check()
            run.stop.check()
        flush(run)
        run.saver.finish(last=True)
        remove_copies(run)
        run.require_rewards(at)
    except (Stopped, *FAILED) as reason:
        stop_early(run, at, reason)
        if not isinstance(reason, Stopped):
            raise
    except Exception:
        run.recorder.record_held(at.step + 1)
        run.saver.finish_or_warn()  # earlier checkpoints stay
        raise


def stop_early(run: TrainingRun, at: Position, reason: Exception) -> None:
    """Save the last whole step, unless groups sampled for the next steps are lost."""
    lost, why = False, f"{reason}: " if isinstance(reason, Stopped) else ""  # the caller reports errors
    if not isinstance(reason, Stopped) and (kept := run.recorder.record_held(at.step + 1)):
        log.warning("the responses of step %d are kept in %s%s", at.step + 1, kept, advice(reason))
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
        run.saver.finish(last=True)
    remove_copies(run)


def remove_copies(run: TrainingRun) -> None:
    """Remove the copies in memory, as the last step is on disk."""
    if run.copies is not None:
        run.copies.remove()


KEYS: Mapping[type[Exception], str] = {  # of what a user's code is set in
    RewardFailure: "worker.reward.reward_function",
    AdvantageError: "algorithm.adv_estimator",
    OwnCodeError: "worker.actor.loss_type",
}


def advice(reason: Exception) -> str:
    """Return which setting failed, and what to do; "" for errors that no setting causes."""
    key = next((key for kind, key in KEYS.items() if isinstance(reason, kind)), None)
    return "" if key is None else f": correct {key}, then run the same command again, which repeats the step"


def sample_validation(run: TrainingRun, validation: Validation, step: int) -> Measured:
    """Sample answers to the validation prompts with the current weights, and score them."""
    if run.async_sampler:
        run.async_sampler.drain()
    with validation.sampler.generator.active(weights_of(run.learner, step)):
        record, groups = validation.measure()
    run.recorder.record(step, "validation", groups)
    return record, to_generations(groups[: validation.shown], "val")


def finish_step(run: TrainingRun, taken: Taken) -> None:
    """Validate, save and log, and complete the step's metrics. Checkpoint and record are written during the next step.

    A checkpoint is published after the record, so that a resumed run has the records of all its steps.
    """
    at, record, generations = taken.at, taken.metrics, taken.shown
    watch = run.stopwatch()
    if run.validates and run.schedule.validates(at.step):
        try:
            with watch("validation"):
                scores, responses = run.validate(at.step)
        except FAILED:
            run.tracker.log(at.step, record, generations)
            raise
        record.update(scores)
        generations = [*responses, *generations]
    saves = run.schedule.saves(at.step) or run.saver.due
    copies = None if saves or run.copies is None or not run.copies.saves(at.step) else run.copies
    if saves:
        with watch("save_checkpoint"):
            write_checkpoint(run, at, record)
    elif copies:
        with watch("copy_to_memory"):
            copies = copies if copy_to_memory(run, at, copies) else None
    record.update({f"timing_s/{stage}": seconds for stage, seconds in watch.lap().items()})
    with watch.background("log"):
        run.tracker.log(at.step, record, generations)
    if saves:
        run.saver.publish(partial(flush, run))
    elif copies:
        copies.publish(partial(flush, run))


def flush(run: TrainingRun) -> None:
    """Wait until all metrics and samples are written. Raises CheckpointError if a record could not be written."""
    run.tracker.flush()
    run.recorder.flush()


def write_checkpoint(run: TrainingRun, at: Position, record: dict[str, float]) -> None:
    """Snapshot the state and write it in the background, or now if there is no memory for a snapshot."""
    run.saver.finish()
    model_only = run.schedule.save_model_only
    models, copies = models_of(run), snapshot(run, free_memory() // 2, model_only=model_only)
    state = {**at.state(), "val_reward_score": record.get("val/reward_score"), "model_only": model_only}

    def write(name: str, folder: Path) -> None:
        if (copy := copies[name]) is not None:
            copy.write(folder)
        else:
            models[name].save(folder, model_only=model_only)
            models[name].offload()

    run.saver.write(at.step, fill_checkpoint(run, at, write), state, apart=None not in copies.values())


def copy_to_memory(run: TrainingRun, at: Position, saver: MemorySaver) -> bool:
    """Begin to write a copy of the state with `saver`, if there is memory for it; return whether there is."""
    saver.finish()
    copies = snapshot(run, saver.max_bytes, model_only=False)
    whole = {name: copy for name, copy in copies.items() if copy is not None}
    if len(whole) < len(copies):
        return False
    state = {**at.state(), "val_reward_score": None, "model_only": False}

    def write(name: str, folder: Path) -> None:
        whole[name].write(saver.folder_on_ranks(folder))

    saver.write(at.step, fill_checkpoint(run, at, write), state, apart=True)
    return True


def models_of(run: TrainingRun) -> dict[str, Trainable]:
    return {"actor": run.learner} | ({"critic": run.critic} if run.critic else {})


def snapshot(run: TrainingRun, max_bytes: int, *, model_only: bool) -> dict[str, ModelSnapshot | None]:
    copies: dict[str, ModelSnapshot | None] = {}
    for name, model in models_of(run).items():
        copies[name] = model.snapshot(model_only=model_only, max_bytes=max_bytes)
        if run.critic:  # the two are never on the device together
            model.offload()
    return copies


def fill_checkpoint(run: TrainingRun, at: Position, write: Callable[[str, Path], None]) -> Callable[[Path], None]:
    """Return what fills a checkpoint's folder; `write` gets each model's name and folder."""
    pending, assets = run.async_sampler.pending() if run.async_sampler else [], run.assets()

    def fill(folder: Path) -> None:
        for name in models_of(run):
            write(name, folder / name)
        for place, content in assets.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)  # ranks may have written it on other nodes
            (folder / place).write_bytes(content)
        save_stream(at.stream, folder)
        save_pending_steps([step.result() for step in pending], folder)

    return fill
