"""A model's files: what is known before its weights are loaded, and what a checkpoint needs beside them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from r1_cli.config import RunConfig
from r1_cli.models import load as models
from r1_cli.models.adapters import Adapters
from r1_core.learner.parallel import Parallel, Shard


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of the model before its weights are loaded."""

    path: str
    config: Any  # the Hugging Face configuration
    tokenizer: Any
    processor: Any  # the tokenizer itself for text models

    @property
    def vision_language(self) -> bool:
        return models.is_vision_language(self.config)


def open_model(config: RunConfig, path: str | None = None) -> ModelFiles:
    """Read the configuration and tokenizer of `path`, by default `worker.actor.model.model_path`."""
    settings = config.worker.actor.model
    path = path or settings.model_path or ""
    hf_config = models.load_config(
        path, trust_remote_code=settings.trust_remote_code, overrides=settings.override_config
    )
    tokenizer, processor = models.load_tokenizer(
        settings.tokenizer_path or path,
        vision_language=models.is_vision_language(hf_config),
        trust_remote_code=settings.trust_remote_code,
    )
    return ModelFiles(path, hf_config, tokenizer, processor)


def load_weights(
    config: RunConfig,
    model: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel | None = None,
    shard: Shard = Shard(),  # noqa: B008 (frozen)
    adapters: Adapters | None = None,
) -> Any:
    """Return the model of `model.path` in `dtype` on `device`, with what `adapters` put on it.

    With `parallel` it is this rank's share of it, and all ranks must call this.
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
    )


def save_assets(model: ModelFiles, folder: Path) -> None:
    """Write configuration, tokenizer and processor, so that `folder` with weights is a whole Hugging Face model."""
    model.config.save_pretrained(folder)
    model.processor.save_pretrained(folder)
    generation = Path(model.path) / "generation_config.json"
    if generation.is_file():
        (folder / generation.name).write_bytes(generation.read_bytes())
