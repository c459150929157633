"""Where a run starts: anew, or from the newest checkpoint of its folder, if that is a run of the same model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.state.checkpoints import CheckpointStore, read_state
from r1_cli.track.files import read_settings

MODEL = "worker.actor.model.model_path"
# What tells two architectures apart; of the text part, where there are several.
SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")


def find_start(config: RunConfig, store: CheckpointStore) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run.

    Raises:
        ConfigError: the checkpoint that is named is none, a new run would mix with an older one's checkpoints, or the
            folder holds a run of another model.
    """
    trainer = config.trainer
    if trainer.load_checkpoint_path:
        path = Path(trainer.load_checkpoint_path)
        try:
            read_state(path)
        except FileNotFoundError as error:
            raise ConfigError([Problem("trainer.load_checkpoint_path", str(error), str(path))]) from error
        return path
    latest = store.latest()
    if latest and not trainer.find_last_checkpoint:
        message = f"would start anew in {store.root}, which holds checkpoints up to {latest.name}; choose another "
        message += "trainer.experiment_name or trainer.save_checkpoint_path, or set true to go on"
        raise ConfigError([Problem("trainer.find_last_checkpoint", message, "false")])
    if latest:
        _require_same_model(config, latest)
    return latest


def _require_same_model(config: RunConfig, latest: Path) -> None:
    """Raise ConfigError if the folder's run was started from another model than the configuration names.

    A model that is no longer where it was may have moved: then its architecture decides (`require_same_shape`).
    """
    model: Any = read_settings(latest.parent)
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


def require_same_shape(config: RunConfig, start: Path | None, model: Mapping[str, Any]) -> None:
    """Raise ConfigError if a checkpoint's model has another architecture than the configured one.

    Args:
        model: the Hugging Face configuration of the configured model, as a mapping.
    """
    path = start / "actor" / "config.json" if start else None
    if start is None or path is None or not path.is_file():
        return
    before, now = _shape(json.loads(path.read_text(encoding="utf-8"))), _shape(model)
    if other := {name: was for name, was in before.items() if name in now and now[name] != was}:
        told = ", ".join(f"{name} {was} there, {now[name]} here" for name, was in other.items())
        named = config.worker.actor.model.model_path or ""
        raise ConfigError([Problem(MODEL, f"{_refusal(start, 'another model')} ({told})", named)])


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    text = {**model, **(model.get("text_config") or {}), "model_type": model.get("model_type")}
    return {name: text[name] for name in SHAPE if text.get(name) is not None}


def _refusal(checkpoint: Path, model: str) -> str:
    return (
        f"is not the model of the run in {checkpoint.parent}, which was started from {model} and would be resumed from "
        f"{checkpoint.name}, with its weights: set trainer.experiment_name to begin a run of its own, or name "
        f"{'that model' if model == 'another model' else model} to go on with the old one; "
        f"trainer.load_checkpoint_path={checkpoint} starts from it whatever the model is called"
    )
