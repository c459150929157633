"""`r1 merge`: turn a checkpoint of r1, EasyR1 or veRL into a Hugging Face folder."""

import errno
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose, WeightConverter
from transformers.utils.logging import disable_progress_bar

from r1_cli.jobs.model_card import CARD, PROMPTS, is_unedited, read_prompts, read_settings, write_card
from r1_cli.models.adapters import CONFIG_FILE, merge_adapter
from r1_cli.models.families import is_vision_language
from r1_cli.models.load import ModelError, load_config, load_model
from r1_cli.models.verl_shards import find_shards, read_shards
from r1_cli.runs.reader import run_of

log = logging.getLogger("r1")

STATE = ("optimizer", "learner.json", "model", "adapter_")  # what a merged folder does not take over as it is


def merge(checkpoint: Path, output: Path | None = None) -> Path:
    """Write weights, configuration, tokenizer and processor of a checkpoint as one Hugging Face folder.

    Weights keep their training precision, so that the folder scores as the checkpoint. An adapter is merged in float32.
    Checkpoints of EasyR1 and veRL have FSDP shards (`models.verl_shards`), with configuration and tokenizer in
    `actor/huggingface`.

    Args:
        checkpoint: a `global_step_N` folder, or the `actor` folder inside it.
        output: by default `actor/huggingface` inside the checkpoint.

    Returns:
        The folder, complete or absent. It has a model card, README.md, unless there was one that somebody edited; and
        the run's prompts, for `r1 chat`.

    Raises:
        ModelError: there is no checkpoint, weights do not fit the configuration, or an adapter's base is missing.
        ShardError: shards are missing, damaged, or hold objects other than tensors.
        AdapterError: an adapter next to shards is no plain LoRA of their model.
        FileExistsError: `output` exists and no earlier merge wrote it.
        OSError: the folder cannot be written.
    """
    if checkpoint.name == "critic" and (checkpoint.parent / "actor").is_dir():
        raise ModelError(f"{checkpoint} forecasts returns and writes no text: name {checkpoint.parent}, for its actor")
    actor = checkpoint if checkpoint.name == "actor" else checkpoint / "actor"
    sharded = not (actor / "config.json").is_file()
    shards = find_shards(actor) if sharded else []
    if sharded and not shards:
        raise ModelError(
            f"{checkpoint} is not a checkpoint of r1, EasyR1 or veRL: {actor} has neither config.json nor "
            "model_world_size_*_rank_*.pt"
        )
    output = output or actor / "huggingface"
    if output.exists() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise FileExistsError(f"--output {output} exists and is no model folder; name another one")
    disable_progress_bar()
    with ExitStack() as stack:
        output.parent.mkdir(parents=True, exist_ok=True)
        if shards:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix=".shards_", dir=output.parent)))
            dtype = _join_shards(actor, shards, folder)
        else:
            folder, dtype = actor, torch.float32
        model = load_model(str(folder), config=load_config(str(folder)), dtype=dtype, device=torch.device("cpu"))
        if shards and (actor / "lora_adapter" / CONFIG_FILE).is_file():
            merge_adapter(model.float(), actor / "lora_adapter", dtype)
        if not (actor / CONFIG_FILE).is_file():  # an adapter's base was read from its published files
            name_as_published(model)
        _write(model, folder, output, describe(checkpoint, output, vision=is_vision_language(model.config)))
    return output


def describe(checkpoint: Path, output: Path, *, vision: bool) -> dict[str, bytes]:
    """Return the card and the prompts of a merged checkpoint, by file name."""
    card, files = output / CARD, {CARD: write_card(checkpoint, output.name, vision=vision).encode()}
    if card.is_file() and not is_unedited(card.read_text(encoding="utf-8", errors="replace")):
        log.warning("%s stays as it is; remove it to get a card of this checkpoint", card)
        files[CARD] = card.read_bytes()
    if prompts := read_prompts(read_settings(run_of(checkpoint))):
        files[PROMPTS] = (json.dumps(prompts, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _join_shards(actor: Path, shards: list[Path], folder: Path) -> torch.dtype:
    """Write the model of the shards, without an adapter; return its dtype, float32 if mixed."""
    assets = actor / "huggingface"
    if not (assets / "config.json").is_file():
        raise ModelError(f"{actor} holds shards, and {assets / 'config.json'} is missing: copy the model's config.json")
    tensors = read_shards(shards)
    if any(name.startswith("base_model.model.") for name in tensors):
        tensors = _base_of(actor, tensors)
    _copy_assets(assets, folder)
    with _saving():
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def _base_of(actor: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not (actor / "lora_adapter" / CONFIG_FILE).is_file():
        raise ModelError(f"{actor} holds an adapter's shards, and {actor / 'lora_adapter' / CONFIG_FILE} is missing")
    names = {name: name.removeprefix("base_model.model.") for name in tensors if ".lora_" not in name}
    return {name.replace(".base_layer.", "."): tensors[old] for old, name in names.items()}


def name_as_published(model: Any) -> None:
    """Make a model that a checkpoint of training was read into save its weights under the names of published ones.

    Transformers saves under the names that it has read. Those of a checkpoint are its own: experts merged, layers where
    its classes have them. Other tools know the published names only. The experts of Qwen3-VL-MoE are published as [in,
    out]: transformers transposes them on loading if they need it, and never on saving.
    """
    found = get_model_conversion_mapping(model, add_legacy=False)
    for conversion in found:
        if isinstance(conversion, WeightConverter):
            conversion.operations = [
                Transpose(step.dim0, step.dim1) if isinstance(step, Transpose) else step
                for step in conversion.operations
            ]
    # A prefix of the whole model differs between checkpoints; one that a part has lost is in all that are published.
    model._weight_conversions = [
        one for one in found if not isinstance(one, PrefixChange) or (one.scope_prefix and one.prefix_to_remove)
    ]


def _write(model: PreTrainedModel, assets: Path, output: Path, files: Mapping[str, bytes]) -> None:
    draft = output.with_name(f".draft_{output.name}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        _copy_assets(assets, draft)
        with _saving():
            model.save_pretrained(draft)
        for name, content in files.items():
            (draft / name).write_bytes(content)
        shutil.rmtree(output, ignore_errors=True)
        draft.rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _saving() -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.ENOSPC, str(error)) from error


def _copy_assets(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(STATE):
            shutil.copy2(file, target / file.name)
