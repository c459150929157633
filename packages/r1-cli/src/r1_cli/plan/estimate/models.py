"""The sizes of models whose weights may be missing."""

from pathlib import Path

from r1_cli.config import RunConfig
from r1_cli.config.model import ModelConfig
from r1_cli.config.root import Owner
from r1_cli.plan.model_sizes import Models, ModelSizes, Shapes, from_config, read_sizes


def find_models(config: RunConfig) -> tuple[Models, list[str]]:
    """Return the sizes of the trained models, and a note for each without weights here.

    Without safetensors files, a `config.json` in a folder or the Hugging Face cache is enough: the model is built on
    torch's meta device, without network. Raises ModelError.
    """
    from r1_cli.models.load import ModelError

    found, notes = dict[Owner, ModelSizes](), list[str]()
    owners: tuple[Owner, ...] = ("actor", "critic") if config.has_critic else ("actor",)
    for owner in owners:
        model, key = config.trained(owner).model, f"worker.{owner}.model.model_path"
        if not model.model_path:
            raise ModelError(f"{key} is not set: name a folder with config.json, or a model of the hub that is cached")
        sizes = read_sizes(model, owner)
        if sizes is None:
            file = find_config(model.model_path, key)
            sizes = from_config(file, build_shapes(model, file, key), model, owner)
            notes.append(f"{model.model_path}: no weights here, counted from its config.json")
        found[owner] = sizes
    return found, notes


def find_config(name: str, key: str) -> Path:
    """Return the `config.json` of a folder, or of a cached hub name. Raises ModelError."""
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


def build_shapes(model: ModelConfig, file: Path, key: str) -> Shapes:
    """Return the shapes of a model's tensors, without repetitions. Raises ModelError."""
    import torch

    from r1_cli.models.load import ModelError, load_config
    from r1_rollout.loading import model_family

    name = model.model_path
    try:
        trusted = model.trust_remote_code
        config = load_config(str(file.parent), trust_remote_code=trusted, overrides=model.override_config, key=key)
        with torch.device("meta"):
            built = model_family(config).from_config(config, trust_remote_code=trusted)
    except ModelError as error:
        raise ModelError(str(error).replace(str(file.parent), str(name))) from error
    except Exception as error:  # a model family fails in any way on a configuration that is not its own
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{key}={name}: no model can be built of its config.json ({message})") from error
    return {name: tuple(weight.shape) for name, weight in built.named_parameters()}
