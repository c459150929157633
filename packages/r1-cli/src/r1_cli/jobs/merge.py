"""From a checkpoint of r1 to a Hugging Face folder that every tool can load."""

import shutil
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from r1_cli.models.load import ModelError, load_config, load_model

STATE = ("optimizer", "learner.json", "model", "adapter_")  # what a merged folder does not take over as it is


def merge(checkpoint: Path, output: Path | None = None) -> Path:
    """Write the checkpoint's weights, configuration, tokenizer and processor as one Hugging Face folder.

    The weights keep the precision they were trained in, so that the folder scores exactly as the checkpoint does. An
    adapter is folded into its base, in float32.

    Args:
        checkpoint: a `global_step_N` folder, or the `actor` folder inside it.
        output: where to; by default `actor/huggingface` inside the checkpoint.

    Returns:
        The folder; it is complete or not there at all.

    Raises:
        ModelError: no checkpoint there, its weights do not fit its configuration, or an adapter's base is not there.
        FileExistsError: `output` exists and is not a folder that an earlier merge wrote.
    """
    if checkpoint.name == "critic" and (checkpoint.parent / "actor").is_dir():
        raise ModelError(f"{checkpoint} forecasts returns and writes no text: name {checkpoint.parent}, for its actor")
    actor = checkpoint if checkpoint.name == "actor" else checkpoint / "actor"
    if not (actor / "config.json").is_file():
        raise ModelError(f"{checkpoint} is not a checkpoint of r1: {actor / 'config.json'} is missing")
    output = output or actor / "huggingface"
    if output.exists() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise FileExistsError(f"--output {output} exists and is no model folder; name another one")
    disable_progress_bar()
    model = load_model(str(actor), config=load_config(str(actor)), dtype=torch.float32, device=torch.device("cpu"))
    draft = output.with_name(f".draft_{output.name}")
    shutil.rmtree(draft, ignore_errors=True)
    for file in actor.iterdir():
        if file.is_file() and not file.name.startswith(STATE):
            draft.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, draft / file.name)
    model.save_pretrained(draft)
    shutil.rmtree(output, ignore_errors=True)
    draft.rename(output)
    return output
