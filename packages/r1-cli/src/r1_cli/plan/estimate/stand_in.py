"""A folder that stands in for a model whose weights are not here: its config.json, and the shapes of its tensors."""

import json
import shutil
from pathlib import Path

from r1_cli.config import RunConfig
from r1_cli.config.model import ModelConfig
from r1_cli.plan.memory import read_shapes
from r1_cli.plan.phases import with_value


def stand_in(config: RunConfig, folder: Path) -> tuple[RunConfig, list[str]]:
    """Return the configuration with models of which the shapes of all tensors are known, and what was done for it.

    Models whose safetensors files are here are left as they are. Of others `config.json`, in a folder or in the cache
    of the Hugging Face hub, is enough: the model is built without memory for its values. The network is not asked.

    Args:
        folder: where to write the stand-ins.

    Raises:
        ModelError: there is no model, its configuration is not here, or nothing can be built of it.
    """
    from r1_cli.models.load import ModelError

    notes = []
    for owner in ("actor", "critic") if config.has_critic else ("actor",):
        model: ModelConfig = getattr(config.worker, owner).model
        key = f"worker.{owner}.model.model_path"
        if not model.model_path:
            raise ModelError(f"{key} is not set: name a folder with config.json, or a model of the hub that is cached")
        if any(read_shapes(Path(model.model_path))):
            continue
        own = folder / owner
        _write(model, find_config(model.model_path, key), own, key)
        notes.append(f"{model.model_path}: no weights here, counted from its config.json")
        config = with_value(config, key, str(own))
    return config, notes


def find_config(name: str, key: str) -> Path:
    """Return the `config.json` of a folder, or of a hub name in the local cache.

    Raises:
        ModelError: it is not there.
    """
    from r1_cli.models.load import ModelError

    if Path(name).is_dir():
        if not (found := Path(name, "config.json")).is_file():
            raise ModelError(f"{key}={name}: the folder has no config.json")
        return found
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelError(f"{key}={name}: neither a folder nor a name of the hub") from error
    if not isinstance(cached, str):
        raise ModelError(
            f"{key}={name}: neither a folder here nor in the cache of the hub, which is not asked; get it with "
            f"`hf download {name} config.json`"
        )
    return Path(cached)


def _write(model: ModelConfig, config_file: Path, folder: Path, key: str) -> None:
    folder.mkdir(parents=True)
    shutil.copyfile(config_file, folder / "config.json")
    tensors = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in build_shapes(model, folder, key).items()
    }
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def build_shapes(model: ModelConfig, folder: Path, key: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that the model of a configuration has, each once however often it is used.

    Raises:
        ModelError: it is of no family that transformers knows, or needs code of its own.
    """
    import torch

    from r1_cli.models.load import ModelError, load_config, model_family

    name = model.model_path
    try:
        config = load_config(str(folder), overrides=model.override_config, key=key)
        with torch.device("meta"):
            built = model_family(config).from_config(config)
    except ModelError as error:
        raise ModelError(str(error).replace(str(folder), str(name))) from error
    except Exception as error:  # whatever a family makes of a configuration that is not its own
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{key}={name}: no model can be built of its config.json ({told})") from error
    return {name: tuple(weight.shape) for name, weight in built.named_parameters()}
