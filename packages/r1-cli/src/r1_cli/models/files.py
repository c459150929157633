"""A model's files, read before its weights are loaded, and saved with checkpoints.

Files come from a folder, a URL, the Hugging Face hub (HF_ENDPOINT names a mirror), or ModelScope with
USE_MODELSCOPE_HUB=1.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from r1_cli.config import RunConfig
from r1_cli.config.files import is_url
from r1_cli.models import load as models
from r1_cli.models.adapters import Adapters
from r1_cli.models.families import is_vision_language
from r1_cli.models.quantized_files import without_quantization
from r1_cli.models.remote_files import UNREAD, download_model
from r1_core.learner.parallel import Parallel, Shard


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: str
    config: PreTrainedConfig  # the Hugging Face configuration
    tokenizer: Any
    processor: Any  # the tokenizer itself for text models

    @property
    def vision_language(self) -> bool:
        return is_vision_language(self.config)


def open_model(config: RunConfig, path: str | None = None) -> ModelFiles:
    """Read the configuration and tokenizer of `path`, by default `worker.actor.model.model_path`.

    Raises:
        ModelError: there is no such model.
    """
    settings = config.worker.actor.model
    path = resolve_model_path(path or settings.model_path or "", "worker.actor.model.model_path")
    hf_config = models.load_config(
        path, trust_remote_code=settings.trust_remote_code, overrides=settings.override_config
    )
    key = f"worker.actor.model.{'tokenizer' if settings.tokenizer_path else 'model'}_path"
    tokenizer, processor = models.load_tokenizer(
        resolve_model_path(settings.tokenizer_path or path, key),
        vision_language=is_vision_language(hf_config),
        trust_remote_code=settings.trust_remote_code,
        key=key,
    )
    return ModelFiles(path, hf_config, tokenizer, processor)


def resolve_model_path(name: str, key: str) -> str:
    """Return the folder or the Hugging Face hub name of `name`, the value of `key`. Raises ModelError."""
    try:
        return find_model_files(name)
    except OSError as error:
        raise models.ModelError(f"{key}={name}: {error}") from error


def open_critic_config(config: RunConfig, actor: ModelFiles) -> PreTrainedConfig:
    """Return the Hugging Face configuration of the critic's model, which reads the actor's tokens.

    Raises:
        ModelError: it is of another family than the actor's, or has fewer tokens.
    """
    settings, key = config.worker.critic.model, "worker.critic.model.model_path"
    path = resolve_model_path(settings.model_path or "", key)
    critic = models.load_config(
        path, trust_remote_code=settings.trust_remote_code, overrides=settings.override_config, key=key
    )
    if critic.model_type != actor.config.model_type:
        raise models.ModelError(
            f"{key}={path}: its family is {critic.model_type}, the actor's {actor.config.model_type}; a critic reads "
            "the actor's tokens, positions and pictures, so name a model of the same family"
        )
    known, tokens = critic.get_text_config().vocab_size, len(actor.tokenizer)
    if known < tokens:
        raise models.ModelError(f"{key}={path}: it knows {known} tokens, the actor's tokenizer has {tokens}")
    return critic


def load_weights(
    config: RunConfig,
    model: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel | None = None,
    shard: Shard = Shard(),  # noqa: B008 (frozen)
    adapters: Adapters | None = None,
) -> Any:
    """Return the model of `model.path` in `dtype` on `device`, with `adapters` injected.

    Without `adapters`, a base of 4 bits is dequantized. With `parallel` it is this rank's shard, and all ranks must
    call this.
    """
    return models.load_model(
        model.path,
        config=model.config,
        dtype=dtype,
        device=device,
        trust_remote_code=config.worker.actor.model.trust_remote_code,
        parallel=parallel,
        shard=shard,
        adapters=adapters,
        quantization=config.worker.actor.model.quantization,
    )


def read_assets(model: ModelFiles, critic: PreTrainedConfig) -> dict[str, bytes]:
    """Return the files that make the actor's weights a whole model, by their paths in a checkpoint.

    Args:
        critic: its configuration, also included; None: no critic.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_assets(model, folder / "actor")
        if critic is not None:
            without_quantization(critic).save_pretrained(folder / "critic")
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def save_assets(model: ModelFiles, folder: Path) -> None:
    """Write configuration, tokenizer and processor, so that `folder` with weights is a whole Hugging Face model."""
    without_quantization(model.config).save_pretrained(folder)
    model.processor.save_pretrained(folder)
    generation = find_file(model.path, "generation_config.json")
    if generation is not None:
        (folder / generation.name).write_bytes(generation.read_bytes())


def find_file(path: str, name: str) -> Path | None:
    """Return a file of a folder or of a hub name; None if there is none, or the hub cannot be reached."""
    silent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, **silent)
    return None if found is None else Path(found)


# --- ModelScope ------------------------------------------------------------------------------------------------------


def from_modelscope() -> bool:
    return os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "y", "yes")


def find_model_files(name: str) -> str:
    """Return what transformers and engines open: `name` itself, or the folder of files from its URL or from ModelScope.

    Raises:
        OSError: the files cannot be downloaded, or modelscope is not installed.
    """
    if is_url(name):
        return str(download_model(name))
    if not name or not from_modelscope() or Path(name).is_dir():
        return name
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise OSError("USE_MODELSCOPE_HUB is set, but modelscope is not installed: pip install modelscope") from error
    try:
        return str(snapshot_download(name, ignore_patterns=UNREAD))
    except Exception as error:  # of its own kinds, by version
        raise OSError(f"ModelScope does not give {name}: {error}") from error
