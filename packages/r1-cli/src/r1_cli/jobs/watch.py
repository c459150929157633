"""`r1 eval --watch`: evaluate the checkpoints of a run as they appear, and write the figures to its log."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from r1_cli.checkpoint.damage import STATE_FILE
from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.checkpoint.locks import exclusive, find_holder, lock_folder
from r1_cli.config import RunConfig
from r1_cli.config.files import find_model_folder
from r1_cli.config.section import with_value
from r1_cli.jobs.evaluate import EvalOptions, sample_evaluation
from r1_cli.jobs.sample import name_model
from r1_cli.models.load import ModelError
from r1_cli.runs.evaluation.compare import Comparison, compare
from r1_cli.runs.evaluation.logged import CHANGE, read_logged, with_interval
from r1_cli.runs.evaluation.stored import Evaluation, EvaluationError, figures, require_complete
from r1_cli.runs.history import EVALUATED, EVALUATIONS_FILE, History, JsonObject
from r1_cli.runs.rows.parts import SampleFolder
from r1_cli.runs.statistics import mean_interval
from r1_cli.runs.track.files import JsonLines
from r1_rewards.types import RewardFailure
from r1_rollout.errors import RolloutError

MODEL = "worker.actor.model.model_path"
START = "start"  # folder of the start model's answers
OF_ONE = (ModelError, EvaluationError, RewardFailure, RolloutError)  # errors that another checkpoint need not have

Mark = tuple[int, int]  # tells a checkpoint from another one that was written under its name


@dataclass(frozen=True, slots=True)
class StartModel:
    path: str
    adapter: Path | None = None  # merged into it


@dataclass(frozen=True, slots=True)
class WatchOptions:
    answers: Path  # folder; each checkpoint has one of its own in it
    start: StartModel | None = None  # answers the guarded sets; None: there are none
    guarded: Sequence[str] = ()  # names of sets
    partial: bool = False  # as of `r1 eval`
    pause: float = 5.0  # seconds between two looks at the run's folder


def watch(run: Path, config: RunConfig, options: WatchOptions) -> list[int]:
    """Evaluate the checkpoints of a run on the validation sources, the newest first, until it has ended and all are.

    Returns:
        The steps whose evaluation failed; the lines on the terminal say why.

    Raises:
        ConfigError: another process watches into the same folder, or it holds answers that were sampled otherwise.
        DataError, RewardSpecError: rows or rewards cannot be used.
        ModelError, EvaluationError, RewardFailure, RolloutError: of the start model.
        CheckpointError: the log cannot be written.
    """
    advice = "Wait for it, or name another --output"
    with lock_folder(options.answers, ".lock-watch", key="--watch", by="another r1 eval --watch", advice=advice):
        return Watcher(run, config, options).follow()


class Watcher:
    def __init__(self, run: Path, config: RunConfig, options: WatchOptions) -> None:
        self.run, self.config, self.options = run, config, options
        self.store, self.console = CheckpointStore(run), Console()
        self.seen: dict[int, Mark] = {}  # checkpoints that were there once
        self.done: dict[int, Mark] = {}  # that were evaluated, or could not be
        self.failed: dict[int, Mark] = {}
        self.start: Evaluation | None = None

    def follow(self) -> list[int]:
        if self.options.start is not None:
            self.start = self._evaluate_start(self.options.start)
        told = False
        while True:
            holder = find_holder(self.run)  # before the look at its folder, or its last checkpoint could be missed
            if todo := self._find_new():
                self._evaluate(max(todo), todo[max(todo)])
            elif holder is None:
                return sorted(self.failed)
            else:
                if not told:
                    self._print(f"{self.run} is training ({holder}); waiting for its checkpoints")
                told = True
                time.sleep(self.options.pause)

    def _find_new(self) -> dict[int, Mark]:
        """Return the checkpoints that are not evaluated. Prints which were removed before they could be."""
        there = {step: mark for step in self.store.steps() if (mark := self._mark(step)) is not None}
        for step in sorted(self.seen.keys() - there.keys()):
            if self.done.get(step) != self.seen.pop(step):
                self._print(f"step {step}: removed before it was evaluated; trainer.save_limit says how many are kept")
        self.seen |= there
        return {step: mark for step, mark in there.items() if self.done.get(step) != mark}

    def _mark(self, step: int) -> Mark | None:
        try:
            status = (self.store.path(step) / STATE_FILE).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _evaluate_start(self, start: StartModel) -> Evaluation:
        """Evaluate the start model on the guarded sets, sampled as with all sets."""
        sources = self.config.data.val_sources or ()
        guarded = [source for source in sources if source.name in self.options.guarded]
        config = with_value(self.config, "data.val_sources", guarded)
        evaluation = self._sample(START, config, start)
        self._record(0, evaluation, ())
        return evaluation

    def _evaluate(self, step: int, mark: Mark) -> None:
        name = self.store.path(step).name
        try:
            evaluation = self._sample(name, self.config, StartModel(find_model_folder(str(self.store.path(step)))))
            if self._mark(step) not in (mark, None):  # it was replaced, maybe before its weights were read
                self._put_aside(name)
                return
            both = [one for one in (self.start, evaluation) if one is not None]
            comparisons = compare(both, partial=self.options.partial) if self.start else ()
        except Exception as error:
            if self._mark(step) != mark:  # `_find_new` prints that it is gone, or finds the new one
                return
            if not isinstance(error, OF_ONE):
                raise
            self.done[step] = self.failed[step] = mark
            self._print(f"step {step}: not evaluated: {error}")
            return
        self.failed.pop(step, None)
        self.done[step] = mark
        self._record(step, evaluation, comparisons)

    def _sample(self, name: str, config: RunConfig, model: StartModel) -> Evaluation:
        folder = SampleFolder(self.options.answers / name)
        if folder.has_identity and folder.identity()["model"] != name_model(model.path, model.adapter):
            self._put_aside(name)
        config = with_value(config, MODEL, model.path)
        options = EvalOptions(partial=self.options.partial, adapter=model.adapter)
        first = self.start is None and not self.done
        evaluation = sample_evaluation(config, folder.path, options, self.console, describe=first)
        for line in require_complete(evaluation, partial=self.options.partial):
            self._print(f"{name}: {line}")
        return evaluation

    def _put_aside(self, name: str) -> None:
        folder = self.options.answers / name
        aside = folder.with_name(f"{name}.{1 + len(list(folder.parent.glob(f'{name}.*')))}")
        folder.rename(aside)
        self._print(f"{name} has other weights than those that were evaluated, whose answers are now in {aside}")

    def _record(self, step: int, evaluation: Evaluation, comparisons: Sequence[Comparison]) -> None:
        """Print the figures of a step, and add them to the run's log unless it has them."""
        numbers = to_record(evaluation, comparisons)
        known = {name: value for name, value in numbers.items() if value is not None}
        logged = read_logged(History(str(self.run), "r1", [{"step": step, **known}]))
        warnings = [f"step {step} has lost what the start model could: {one}" for one in logged if one.lost]
        for line in (*(f"step {step}: {one}" for one in logged), *(f"warning: {one}" for one in warnings)):
            self._print(line)
        row: JsonObject = {"step": step, "model": evaluation.identity["model"], **numbers, "warnings": warnings}
        with exclusive(self.run):  # which two watchers with different suites share
            lines = JsonLines(self.run / EVALUATIONS_FILE)
            before: JsonObject = {}
            for other in lines.read():
                before |= other if other.get("step") == step else {}
            if before.get("model") != row["model"]:  # figures of other weights end
                row = {**{name: None for name in before if name.startswith(EVALUATED)}, **row}
            if any(before.get(name) != value for name, value in row.items()):
                lines.append([row])

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def to_record(evaluation: Evaluation, comparisons: Sequence[Comparison]) -> dict[str, float | None]:
    """Return the figures of a step by name. NaN is not JSON, and becomes None."""
    found: dict[str, float] = {}
    for name, one in evaluation.sets.items():
        groups = [group for _, group in sorted(one.groups.items())]
        answers = [answer for group in groups for answer in group.answers]
        values, prefix = figures(groups), f"{EVALUATED}{name}/"
        found |= {f"{prefix}{figure}": fmean(rows) for figure, rows in values.items()}
        figure = next(figure for figure in values if figure.startswith("avg@"))
        found |= with_interval(f"{prefix}{figure}", mean_interval(values[figure]))
        found[f"{prefix}response_length/mean"] = fmean(answer.tokens for answer in answers)
        found[f"{prefix}response_length/clip_ratio"] = fmean(answer.cut for answer in answers)
    for other in comparisons:
        change = f"{EVALUATED}{other.set}/{CHANGE}"
        found |= {**with_interval(change, other.difference.mean), f"{change}/p": other.adjusted}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
