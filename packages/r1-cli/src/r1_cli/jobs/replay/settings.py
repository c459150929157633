"""Find the checkpoint before a step and the settings of the start that took it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.folders import CheckpointStore, find_damage, read_state
from r1_cli.runs.reader import RunReader


class NoReplayError(ValueError):
    """A step that cannot be repeated; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How to repeat a step."""

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
    """Return settings and threads of the last start before a step; without a manifest, the last settings."""
    starts = [one for one in RunReader(run).starts() if one["from_step"] < step]
    settings = starts[-1]["config"] if starts else RunReader(run).settings()
    if not settings:
        raise NoReplayError(f"{run} is no run of r1: neither manifest.json nor experiment_config.json is in it")
    threads = starts[-1].get("numerics", {}).get("threads") if starts else None
    return json.loads(json.dumps(settings)), threads
