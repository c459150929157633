"""Where a run starts: new, or from the newest checkpoint of its folder with the same model."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.damage import find_damage
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore, read_state
from r1_cli.checkpoint.memory import newest_copy
from r1_cli.checkpoint.remote import RemoteFolder, fetch_newest
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.files import is_url
from r1_cli.config.section import Tree, with_value
from r1_cli.runs.reader import RunReader

log = logging.getLogger("r1")

MODEL = "worker.actor.model.model_path"
# What tells two architectures apart; of the text part, where there are several.
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")


def find_start(config: RunConfig, store: CheckpointStore) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run.

    Raises:
        ConfigError: the named checkpoint is damaged, checkpoints of two runs would mix, or the folder's run has
            another model, or settings that cannot be read.
    """
    trainer = config.trainer
    if trainer.load_checkpoint_path:
        path = Path(trainer.load_checkpoint_path)
        if is_url(trainer.load_checkpoint_path):  # in a dry run; a run has downloaded it
            return path
        if damage := find_damage(path, contents=store.verifies):
            raise ConfigError([Problem("trainer.load_checkpoint_path", f"is damaged: {damage}", str(path))])
        try:
            read_state(path)
        except FileNotFoundError as error:
            raise ConfigError([Problem("trainer.load_checkpoint_path", str(error), str(path))]) from error
        return path
    damaged = store.damaged()
    whole = [step for step in store.steps() if store.path(step) not in damaged]
    latest = store.path(whole[-1]) if whole else None
    if damaged and latest is None:
        raise ConfigError([Problem("trainer.save_checkpoint_path", _no_whole(damaged), str(store.root))])
    if latest is None and trainer.find_last_checkpoint and (foreign := store.foreign()):
        message = f"holds checkpoints that r1 has not written (global_step_{foreign[-1]}) and cannot resume: set "
        message += "trainer.experiment_name to begin a run of its own; r1 merge reads those of EasyR1 and veRL"
        raise ConfigError([Problem("trainer.save_checkpoint_path", message, str(store.root))])
    if latest and not trainer.find_last_checkpoint:
        message = f"would start anew in {store.root}, which holds checkpoints up to {latest.name}; choose another "
        message += "trainer.experiment_name or trainer.save_checkpoint_path, or set true to go on"
        raise ConfigError([Problem("trainer.find_last_checkpoint", message, "false")])
    if latest:
        _require_same_model(config, latest)
    return latest


def fetch_start(config: RunConfig, store: CheckpointStore) -> RunConfig:
    """Download the checkpoint to resume from, if it is at a URL; return the configuration with its folder.

    From `trainer.upload_path` the newest is downloaded if the run's folder has none, as on a new machine.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    trainer = config.trainer
    named = trainer.load_checkpoint_path
    try:
        if named is not None and is_url(named):
            url, _, name = named.rstrip("/").rpartition("/")
            found = RemoteFolder(url).fetch(name, store.root / "downloads")
            return with_value(config, "trainer.load_checkpoint_path", str(found))
        if named is None and trainer.upload_path and trainer.find_last_checkpoint and not store.steps():
            fetched = fetch_newest(trainer.upload_path, store.root)
            if fetched is not None:
                log.warning("%s was downloaded from %s", fetched, trainer.upload_path)
    except CheckpointError as error:
        key = "load_checkpoint_path" if named else "upload_path"
        raise ConfigError([Problem(f"trainer.{key}", str(error), str(named or trainer.upload_path))]) from error
    return config


def find_newer_copy(config: RunConfig, store: CheckpointStore, start: Path | None) -> Path | None:
    """Return the newest copy in memory of the folder's run if it is newer than `start`, else `start`."""
    trainer = config.trainer
    if trainer.load_checkpoint_path or not trainer.find_last_checkpoint:
        return start
    copy = newest_copy(store.root)
    if copy is None or (start is not None and _step_of(copy) <= _step_of(start)):
        return start
    _require_same_model(config, store.root / copy.name)
    return copy


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def rename_damaged(store: CheckpointStore, start: Path | None) -> list[str]:
    """Rename the damaged checkpoints of a folder to resume in; return a line for each."""
    if start is None or start.parent != store.root:
        return []
    lines = []
    for path, damage in store.damaged().items():
        lost = _step_of(path) - _step_of(start)
        aside = store.set_aside(path)
        again = f": {lost} step{'s are' if lost > 1 else ' is'} taken again" if lost > 0 else ""
        lines.append(
            f"{path} is damaged ({damage}); it is now {aside.name}, and the run resumes from {start.name}{again}"
        )
    return lines


def _no_whole(damaged: Mapping[Path, str]) -> str:
    damage = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
    return (
        f"has no complete checkpoint ({damage}): set trainer.experiment_name to start anew, or name a checkpoint in "
        "trainer.load_checkpoint_path"
    )


def _require_same_model(config: RunConfig, latest: Path) -> None:
    """Raise ConfigError if the folder's run started from another model.

    Moved models are compared by architecture (`require_same_shape`).
    """
    try:
        model: Any = RunReader(latest.parent).settings()
    except ValueError as error:
        message = f"{error}, so that nobody can tell whose checkpoints are beside it: restore the file, or delete it"
        raise ConfigError([Problem("trainer.save_checkpoint_path", message, str(latest.parent))]) from error
    for name in MODEL.split("."):
        model = model.get(name) if isinstance(model, dict) else None
    now = config.worker.actor.model.model_path or ""
    if not isinstance(model, str) or model == now:
        return
    before = Path(model)
    if before.is_absolute() and not before.exists():
        return
    if before.exists() and Path(now).exists() and before.samefile(now):
        return
    raise ConfigError([Problem(MODEL, _refusal(latest, model), now)])


def require_same_shape(config: RunConfig, start: Path | None, model: Tree) -> None:
    """Raise ConfigError if a checkpoint has another architecture than `model`, a Hugging Face configuration."""
    path = start / "actor" / "config.json" if start else None
    if start is None or path is None or not path.is_file():
        return
    before, now = _shape(json.loads(path.read_text(encoding="utf-8"))), _shape(model)
    if other := {name: was for name, was in before.items() if name in now and now[name] != was}:
        differing = ", ".join(f"{name} {was} there, {now[name]} here" for name, was in other.items())
        named = config.worker.actor.model.model_path or ""
        raise ConfigError([Problem(MODEL, f"{_refusal(start, 'another model')} ({differing})", named)])


def _shape(model: Tree) -> Tree:
    text = {**model, **(model.get("text_config") or {}), "model_type": model.get("model_type")}
    return {name: text[name] for name in SHAPE if text.get(name) is not None}


def _refusal(checkpoint: Path, model: str) -> str:
    return (
        f"is not the model of the run in {checkpoint.parent}, which was started from {model} and would be resumed from "
        f"{checkpoint.name}, with its weights: set trainer.experiment_name to begin a run of its own, or name "
        f"{'that model' if model == 'another model' else model} to go on with the old one; "
        f"trainer.load_checkpoint_path={checkpoint} starts from it whatever the model is called"
    )
