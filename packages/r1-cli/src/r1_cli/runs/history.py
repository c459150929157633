"""A run's numbers under r1's names, read from the logs of r1, EasyR1, veRL or TRL."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from r1_cli.config.section import flatten

JsonObject = dict[str, Any]
Number = TypeVar("Number", float, float | None)

LOG_FILE, CONFIG_FILE, TRL_FILE = "experiment_log.jsonl", "experiment_config.json", "trainer_state.json"
EVALUATIONS_FILE = "evaluations.jsonl"  # what `r1 eval --watch` measures of the checkpoints, beside the log
EVALUATED = "eval/"  # how their names begin
LOG_FILES = (LOG_FILE, EVALUATIONS_FILE)  # of a run; a step may have records in both

# TRL's and veRL's names for what r1 has another name for; a * stands for a name that is kept.
OF_TRL = {
    "reward": "reward/overall",
    "frac_reward_zero_std": "reward/groups_without_variance",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy_loss",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "clip_ratio": "actor/pg_clipfrac_higher",
    "clip_ratio/region_mean": "actor/pg_clipfrac_higher",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_gap_mean",
    "eval_reward": "val/reward_score",
    "step_time": "timing_s/step",
}
OF_VERL = {
    "critic/score/mean": "reward/overall",
    "actor/entropy": "actor/entropy_loss",
    "actor/pg_clipfrac": "actor/pg_clipfrac_higher",
}
VALIDATION_OF_VERL = ("val-core/", "val/test_score/")


class NoHistoryError(ValueError):
    """A path without a run's numbers; the message names the files that were looked for."""


@dataclass(frozen=True, slots=True)
class WindowMean:
    mean: float
    error: float  # of the mean, one standard deviation
    first: int  # step
    last: int


@dataclass(frozen=True, slots=True)
class History:
    """The numbers of a run by step, and its known settings."""

    name: str
    writer: str  # r1, verl or trl
    steps: list[dict[str, float]]  # each with `step`; training's and validations'
    config: Mapping[str, object] = field(default_factory=dict)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for every finite value."""
        return [
            (int(one["step"]), one[name])
            for one in self.steps
            if isinstance(one.get(name), int | float) and math.isfinite(one[name])
        ]

    def best(self, name: str) -> WindowMean | None:
        """Return the highest mean of a number over a tenth of the steps; None below 3 values."""
        size = max(3 / max(len(self.series(name)), 3), 0.1)
        windows = [self.window(name, first, first + size) for first in (i / 20 for i in range(20))]
        return max((one for one in windows if one), key=lambda one: one.mean, default=None)

    def names(self, prefix: str) -> list[str]:
        return sorted({name for one in self.steps for name in one if name.startswith(prefix)})

    def window(self, name: str, begin: float, end: float) -> WindowMean | None:
        """Return a number's mean between two fractions of the run's steps; None below 3 values."""
        known = self.series(name)
        first = min(round(begin * len(known)), max(len(known) - 3, 0))
        part = known[first : max(round(end * len(known)), first + 3)]
        if len(part) < 3:
            return None
        values = [value for _, value in part]
        return WindowMean(fmean(values), spread(values) / math.sqrt(len(values)), part[0][0], part[-1][0])

    def early(self, name: str) -> WindowMean | None:
        """Return a number's mean over the run's first eighth."""
        return self.window(name, 0, 0.125)

    def late(self, name: str) -> WindowMean | None:
        return self.window(name, 0.75, 1)

    def setting(self, key: str) -> object:
        value: object = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation, infinite for values too large to square."""
    try:
        return stdev(values)
    except OverflowError:
        return math.inf


def read_history(path: Path) -> History:
    """Read a run's folder or log, or TRL's `trainer_state.json`. Raises NoHistoryError if it has no step."""
    file, *evaluated = find_logs(path)
    config: JsonObject = {}
    if file.name == TRL_FILE or file.suffix == ".json":
        writer, steps = "trl", read_trl(file)
    else:
        writer, steps = read_lines(file)
        config = _read_json(file.parent / CONFIG_FILE)
    if not steps:
        raise NoHistoryError(f"{file} holds no step")
    for one in evaluated:
        steps = with_evaluations(steps, one)
    return History(str(path), writer, steps, config)


def find_logs(path: Path) -> list[Path]:
    """Return the files with a run's numbers, its log first. Raises NoHistoryError if it has no log."""
    log = find_log(path)
    others = [log.with_name(name) for name in LOG_FILES if log.name == LOG_FILE and name != LOG_FILE]
    return [log, *(one for one in others if one.is_file())]


def find_log(path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / LOG_FILE, path / TRL_FILE, *sorted(path.glob("checkpoint-*/" + TRL_FILE), key=_checkpoint)[-1:]]
    for file in found:
        if file.is_file():
            return file
    raise NoHistoryError(f"{path} is no run: there is no {LOG_FILE} (r1, EasyR1, veRL) and no {TRL_FILE} (TRL) in it")


def _checkpoint(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def read_lines(file: Path) -> tuple[str, list[dict[str, float]]]:
    """Return the writer and the steps of a file of JSON lines; incomplete lines are skipped."""
    steps: list[dict[str, float]] = []
    writer = "r1"
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := read_line(line):
            writer, numbers = found
            steps.append({name: value for name, value in numbers.items() if value is not None})
    return writer, steps


def with_evaluations(steps: Sequence[dict[str, float]], file: Path) -> list[dict[str, float]]:
    """Return the steps with the figures of a file of evaluations. Its later lines win, and null removes a figure."""
    found: dict[int, dict[str, float | None]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if numbers := read_line(line):
            found.setdefault(int(numbers[1]["step"] or 0), {}).update(numbers[1])
    whole: list[dict[str, float | None]] = [{**one, **found.pop(int(one["step"]), {})} for one in steps]
    whole = sorted([*whole, *found.values()], key=lambda one: one["step"] or 0)
    return [{name: value for name, value in one.items() if value is not None} for one in whole]


def read_line(line: str | bytes) -> tuple[str, dict[str, float | None]] | None:
    """Return the writer and the numbers of a logged step under r1's names; None for a line that is no step.

    EasyR1 nests its numbers by section, veRL has them under `data`.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return None
        if not isinstance(row.get("data"), dict):
            return "r1", _numbers(row)
        numbers = renamed(_numbers({"step": row["step"], **row["data"]}), OF_VERL)
    except (ValueError, RecursionError):
        return None
    scores = [one for name, one in numbers.items() if one is not None and name.startswith(VALIDATION_OF_VERL)]
    return "verl", numbers | ({"val/reward_score": fmean(scores)} if scores else {})


def read_trl(file: Path) -> list[dict[str, float]]:
    state = _read_json(file)
    steps = []
    for row in state.get("log_history") or []:
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        flat = renamed({name: value for name, value in _numbers(row).items() if value is not None}, OF_TRL)
        for name in [name for name in flat if name.startswith("rewards/") and name.endswith("/mean")]:
            flat[f"reward/{name.split('/')[1]}"] = flat.pop(name)
        steps.append(flat)
    return steps


def renamed(row: Mapping[str, Number], names: Mapping[str, str]) -> dict[str, Number]:
    return {names.get(name, name): value for name, value in row.items()}


def _numbers(row: Mapping[str, object]) -> dict[str, float | None]:
    flat = flatten(row, separator="/")
    return {
        name: value
        for name, value in flat
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _read_json(file: Path) -> JsonObject:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
