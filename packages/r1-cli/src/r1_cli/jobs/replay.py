"""`r1 replay`: repeat a recorded step, compare it bit by bit, and print its stages."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pyarrow as pa

from r1_cli.checkpoint.damage import find_damage
from r1_cli.checkpoint.folders import CheckpointStore, read_state
from r1_cli.runs.history import EVALUATED
from r1_cli.runs.reader import FORKED, RunReader

ROUNDING = 1e-3  # between sums in another order, over the steps since a checkpoint


class NoReplayError(ValueError):
    """A step that cannot be repeated; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Replay:
    step: int
    start: int  # the step of the checkpoint that it goes on from; 0: the model as it came
    config: dict[str, Any]
    threads: int | None  # of torch in the process that took the step; None: the run does not say


def plan_replay(run: Path, step: int, folder: Path) -> Replay:
    """Return how to repeat `step` in another folder, from the last checkpoint before it.

    Raises:
        NoReplayError: the folder is no run, or has not taken the step.
    """
    config, threads = _settings_of(run, step)
    taken = max((int(one["step"]) for one in RunReader(run).records()), default=None)
    if taken is not None and step > taken:
        raise NoReplayError(f"step {step} of {run} cannot be taken again: it has taken {taken} steps")
    store = CheckpointStore(run)
    whole = (one for one in reversed(store.steps()) if one < step and find_damage(store.path(one)) is None)
    start = next((one for one in whole if not read_state(store.path(one))["model_only"]), 0)
    trainer = config["trainer"]
    trainer |= {
        "save_checkpoint_path": str(folder), "load_checkpoint_path": str(store.path(start)) if start else None,
        "find_last_checkpoint": False, "save_freq": -1, "val_freq": -1, "val_before_train": False, "val_only": False,
        "logger": ["file"], "timeline": 0, "record_gb": max(trainer.get("record_gb") or 0, 1),
    }  # fmt: skip
    return Replay(step, start, config, threads)


def _settings_of(run: Path, step: int) -> tuple[dict[str, Any], int | None]:
    """Return settings and threads of the last start before a step; the last settings without a manifest."""
    starts = [one for one in RunReader(run).starts() if one["from_step"] < step]
    settings = starts[-1]["config"] if starts else RunReader(run).settings()
    if not settings:
        raise NoReplayError(f"{run} is no run of r1: neither manifest.json nor experiment_config.json is in it")
    threads = starts[-1].get("numerics", {}).get("threads") if starts else None
    return json.loads(json.dumps(settings)), threads


# In the order in which a step makes them: the first that differs is where to look.
IN_ORDER = (
    "prompt_id", "prompt_tokens", "media", "tokens", "rollout_logprobs", "finish_reason", "sampled", "stop_reason",
    "turns", "score", "parts", "failure", "reward", "old_logprobs", "entropies", "ref_logprobs",
    "teacher_logprobs", "teacher_top", "teacher_top_ids", "advantages",
)  # fmt: skip
NOT_OF_THE_STEP = ("timing_", "perf/", "gen/busy", "val/", "val-", EVALUATED)  # times, and what follows it
OF_THE_ORDER = "gen/prefilled_per_token"  # it depends on which requests enter the engine together


@dataclass(frozen=True, slots=True)
class StepComparison:
    answers: int | None  # that were compared; None: the run has no record of the step
    metrics: int | None  # that were compared; None: the run has no log of the step
    differences: list[str]  # in the order in which a step makes what differs
    changes: list[str]  # of what the run stood on: packages, code, rows
    tolerance: float = 0.0  # of numbers, relative and absolute; 0: bit for bit

    @property
    def same(self) -> bool:
        """Whether something could be compared, and all of it is equal."""
        return not self.differences and (self.answers or self.metrics) is not None


def compare_step(run: Path, again: Path, step: int, tolerance: float = 0.0) -> StepComparison:
    differences: list[str] = []
    answers = None
    if step in RunReader(run).recorded_steps():
        then, now = (RunReader(folder).sample_table(step) for folder in (run, again))
        answers = len(then)
        differences += compare_tables(then, now, tolerance)
    metrics = None
    logged, repeated = (read_metrics(folder, step) for folder in (run, again))
    if logged:
        metrics = len(logged)
        differences += [
            f"{name} is {repeated.get(name)!r}, was {value!r}"
            for name, value in logged.items()
            if not _equal(value, repeated.get(name), tolerance) and not (tolerance and name == OF_THE_ORDER)
        ]
    return StepComparison(answers, metrics, differences, list_changes(run, again), tolerance)


def compare_tables(then: pa.Table, now: pa.Table, tolerance: float = 0.0) -> list[str]:
    """Return the columns that differ, each with its first differing row."""
    if len(then) != len(now):
        return [f"{len(now)} answers, there were {len(then)}"]
    return [
        f"{name} of group {then['group'][row].as_py()}, answer {then['sample'][row].as_py()}"
        for name in IN_ORDER
        if name in then.column_names  # which a record of an older version may lack
        if (row := _first_unequal(_values(then, name), _values(now, name), tolerance)) is not None
    ]


def _values(table: pa.Table, name: str) -> list[Any]:
    """Return a column; of calls without their seconds and causes, which older records lack."""
    values: list[Any] = table[name].to_pylist()
    if name != "turns":
        return values
    return [
        turns and [{**turn, "calls": [_without_clock(call) for call in turn["calls"] or ()]} for turn in turns]
        for turns in values
    ]


def _without_clock(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in ("seconds", "cause")}


def read_metrics(run: Path, step: int) -> dict[str, Any]:
    """Return a step's metrics without times and validation; {} if it was not logged."""
    found: dict[str, Any] = {}
    for row in RunReader(run).records():
        if row.get("step") == step:
            found |= row
    return {name: value for name, value in found.items() if not name.startswith(NOT_OF_THE_STEP)}


def list_changes(run: Path, again: Path) -> list[str]:
    starts = RunReader(run).starts()[-1:], RunReader(again).starts()[-1:]
    if not all(starts):
        return []
    then, now = starts[0][0], starts[1][0]
    changes = [
        f"{name} {now['packages'].get(name)}, was {known}"
        for name, known in then["packages"].items()
        if now["packages"].get(name) != known
    ]
    commits = [(one.get("git") or {}).get("commit") for one in (then, now)]
    if commits[0] != commits[1]:
        changes.append(f"commit {commits[1]}, was {commits[0]}")
    changes += [
        f"other rows in {name}"
        for name, digest in now["rows"].items()
        if name in then["rows"] and then["rows"][name] != digest
    ]
    return changes


def _first_unequal(then: list[Any], now: list[Any], tolerance: float) -> int | None:
    return next((row for row, (a, b) in enumerate(zip(then, now, strict=True)) if not _equal(a, b, tolerance)), None)


def _equal(a: object, b: object, tolerance: float) -> bool:
    """Compare numbers up to a tolerance, 0: bit for bit; NaN equals NaN."""
    if isinstance(a, float) and isinstance(b, float):
        both = math.isnan(a) and math.isnan(b)
        return both or a == b or (tolerance > 0 and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(one, other, tolerance) for one, other in zip(a, b, strict=True))
    return bool(a == b)


LONGEST = 2_000  # characters of a text that are shown
TOKENS = 12  # of an answer that are listed, from its beginning and from its end
OF_TOKENS = {  # columns, and what they are called
    "rollout_logprobs": "engine",
    "old_logprobs": "learner",
    "entropies": "entropy",
    "ref_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "advantages": "advantage",
}
OF_THE_UPDATE = ("actor/", "critic/vf", "critic/grad", "critic/lr")


def show_group(run: Path, step: int, group: int) -> Iterator[str]:
    """Yield the lines about a group. Raises NoReplayError if the step has no such group."""
    rows = RunReader(run).samples(step)
    ours = [row for row in rows if row["group"] == group]
    if not ours:
        raise NoReplayError(f"step {step} has groups 0 to {rows[-1]['group']}, not {group}")
    yield from show_prompt(ours[0])
    for row in ours:
        yield from show_answer(row)
    yield from show_comparison(ours)
    yield from show_update(read_metrics(run, step), len({row["group"] for row in rows}))


def show_prompt(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"1. prompt: {row['prompt_id']}, source {row['source']}, truth {_short(row['ground_truth'])!r}"
    yield _indented(_short(row["prompt"]))
    tokens = row["prompt_tokens"]
    yield f"   {len(tokens)} tokens: {_listed(tokens)}"
    if row["media"]:
        yield f"   {len(row['media'])} pictures or videos: {', '.join(f'media/{name}' for name in row['media'])}"


def show_answer(row: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    fork = f", forked from a prompt of {len(row['prompt_tokens'])} tokens" if row["stop_reason"] == FORKED else ""
    yield (
        f"2. answer {row['sample']}{fork}: {len(row['tokens'])} tokens by weights of version {row['weight_version']}, "
        f"ended by {row['finish_reason']}"
    )
    yield _indented(_short(row["answer"]))
    none = [None] * len(row["tokens"])
    names = {name: title for name, title in OF_TOKENS.items() if row[name] or name != "teacher_logprobs"}
    table = [*zip(row["tokens"], *(row[name] or none for name in names), strict=True)]
    yield f"   {'token':>9} " + " ".join(f"{title:>10}" for title in names.values()) + "   nats"
    shown = table if len(table) <= 2 * TOKENS else [*table[:TOKENS], None, *table[-TOKENS:]]
    for line in shown:
        yield "           …" if line is None else f"   {line[0]:>9} " + " ".join(_number(value) for value in line[1:])
    parts = ", ".join(f"{name} {value:g}" for name, value in row["parts"].items())
    yield f"3. score {row['score']:g} ({parts or 'no parts'}), reward after shaping {row['reward']:g}"
    for name in ("extracted", "reason", "failure"):
        if row[name]:
            yield f"   {name}: {_short(row[name])}"


def show_comparison(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [row for row in rows if row["stop_reason"] != FORKED]
    rewards = [row["reward"] for row in rows]
    yield ""
    spread = pstdev(rewards)
    yield f"4. group: mean reward {fmean(rewards):.6g}, standard deviation {spread:.6g} over {len(rows)} answers"
    first = [row["advantages"][0] if row["advantages"] else None for row in rows]
    yield "   advantages, of each answer's first token: " + " ".join(_number(value).strip() for value in first)


def show_update(metrics: Mapping[str, Any], groups: int) -> Iterator[str]:
    yield ""
    yield f"5. update, of all {groups} groups of the step:"
    for name, value in metrics.items():
        if name.startswith(OF_THE_UPDATE) and isinstance(value, int | float):
            yield f"   {name:<34} {value:.9g}"


def _number(value: float | None) -> str:
    return f"{'–':>10}" if value is None else f"{value:>10.5f}"


def _listed(tokens: Sequence[int]) -> str:
    shown = [*map(str, tokens[:TOKENS])] + (["…", *map(str, tokens[-TOKENS:])] if len(tokens) > 2 * TOKENS else [])
    return " ".join(shown if len(tokens) > 2 * TOKENS else map(str, tokens))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def _indented(text: str) -> str:
    return "\n".join(f"   | {line}" for line in text.splitlines() or [""])
