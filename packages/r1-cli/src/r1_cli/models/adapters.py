"""Low-rank adapters in a model: peft's layers around linear ones, and their factors.

LoRA, arXiv 2106.09685: W x becomes W x + (alpha / rank) · B · A x; only A and B are trained. Factors are float32,
whatever the dtype of the base.
"""

import hashlib
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from r1_cli.config.model import LoraConfig
from r1_core.learner.optim import matching, nearest
from r1_core.learner.parallel import place_like
from r1_rollout.lora import Adapter

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
MISSING = "worker.actor.model.lora needs peft: install r1-cli[lora]"
# What would make W x other than said above; a folder that has one of these set is no plain LoRA.
VARIANTS = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
)
_KEY = "worker.actor.model.lora"
_FACTOR = re.compile(r"\.lora_(A|B)\.default\.weight$")


class AdapterError(ValueError):
    """An adapter that does not fit a model; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Form:
    rank: int
    alpha: float
    target_modules: str | list[str]  # all-linear, ends of names, or a regular expression of whole names
    exclude_modules: str | list[str] | None
    start: Path | None = None  # a folder whose factors it begins with; else it begins as nothing

    @classmethod
    def of(cls, lora: LoraConfig) -> "Form":
        """Return the form that a configuration, or the folder in it, specifies.

        Raises:
            AdapterError: the folder has no plain LoRA, or one of another rank, or on other layers than are listed.
        """
        if lora.path is None:
            return cls(lora.rank, lora.alpha, lora.target_modules, lora.exclude_modules)
        folder = Path(lora.path)
        saved = read_config(folder)
        if lora.rank not in (0, saved["r"]):
            raise AdapterError(f"{_KEY}.rank={lora.rank}: the adapter in {folder} has rank {saved['r']}; leave it 0")
        asked, has = lora.target_modules, saved["target_modules"]
        if asked != "all-linear" and (asked != has if isinstance(has, str) else {*asked} != {*has}):
            raise AdapterError(
                f"{_KEY}.target_modules={asked}: the adapter in {folder} is on {has}; leave it all-linear"
            )
        return cls(saved["r"], saved["lora_alpha"], saved["target_modules"], saved.get("exclude_modules"), folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the `adapter_config.json` of a folder. Raises AdapterError if it has no plain LoRA."""
    try:
        saved: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        kind = saved["peft_type"], saved["r"], saved["lora_alpha"], saved["target_modules"]
    except (OSError, ValueError, KeyError) as error:
        raise AdapterError(f"{folder} holds no adapter: {CONFIG_FILE} cannot be read ({error!r})") from error
    odd = [name for name in VARIANTS if saved.get(name)]
    if kind[0] != "LORA" or odd or saved.get("bias", "none") != "none":
        raise AdapterError(f"{folder}: {', '.join(odd) or kind[0]} is not served, only plain LoRA without biases is")
    return saved


class Adapters:
    def __init__(self, form: Form) -> None:
        self.form = form
        self.config: Any = None  # peft's
        self._layers: dict[str, Any] = {}  # peft's, by name of the linear layer that each has inside

    def inject(self, model: PreTrainedModel) -> None:
        """Wrap the target layers in peft's; the factors have no values before `fill`.

        Raises:
            AdapterError: a pattern matches nothing in the model, or a layer that is not linear; peft is missing.
        """
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        _require_targets(self.form.target_modules, linear)
        excluded = _excluded(model, self.form.exclude_modules)
        if not find_spec("peft"):
            raise AdapterError(MISSING)
        # It complains of kernels for 4 bits where it is installed, which peft asks, whatever it is asked for.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self.config = PeftConfig(
            r=self.form.rank,
            lora_alpha=self.form.alpha,
            target_modules=self.form.target_modules,
            exclude_modules=excluded,
            task_type="CAUSAL_LM",
        )
        try:
            inject_adapter_in_model(self.config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise AdapterError(f"{_KEY}.target_modules={self.form.target_modules}: {error}") from error
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        if odd := sorted(set(self._layers) - set(linear)):
            kind = type(self._layers[odd[0]].get_base_layer()).__name__
            raise AdapterError(f"{_KEY}.target_modules: {odd[0]} is {kind}; only linear layers are adapted")
        for layer in self._layers.values():
            layer.lora_A.float(), layer.lora_B.float()

    def detach(self, model: nn.Module) -> None:
        for name, layer in self._layers.items():
            _replace(model, name, layer.get_base_layer())

    def attach(self, model: nn.Module) -> None:
        for name, layer in self._layers.items():
            _replace(model, name, layer)

    def fill(self, model: nn.Module) -> None:
        """Initialize the factors, the same on any number of ranks, and freeze everything else.

        Raises:
            AdapterError: the folder to start from has other factors.
        """
        start = None if self.form.start is None else _read_factors(self.form.start)
        names = factor_names(model)
        if start is not None and (odd := sorted(start.keys() ^ set(names.values()))):
            raise AdapterError(f"{self.form.start}: {len(odd)} factors are not this model's or missing: {odd[0]}")
        for name, param in [*model.named_parameters()]:
            param.requires_grad_(name in names)
            if name not in names:
                continue
            value = _begin(name, param.shape) if start is None else start[names[name]]
            if value.shape != param.shape:
                raise AdapterError(f"{self.form.start}: {name} has shape {[*value.shape]}, not {[*param.shape]}")
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, nn.Parameter(_placed(value, param)))

    @contextmanager
    def off(self) -> Iterator[None]:
        # peft's own switch also decides what requires a gradient, which patterns of the configuration have decided.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    def describe(self, base: str) -> str:
        self.config.base_model_name_or_path = base
        with tempfile.TemporaryDirectory(prefix="r1-adapter-") as folder:
            self.config.save_pretrained(folder)
            said = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(said["target_modules"], str):
            said["target_modules"] = sorted(said["target_modules"])  # a set, whose order is chance
        return json.dumps(said | {"inference_mode": True}, indent=2) + "\n"

    @property
    def form_for_engines(self) -> Adapter:
        return Adapter(self.form.rank, self.form.alpha, tuple(self._ends), ())

    @property
    def _ends(self) -> list[str]:
        return sorted({name.rpartition(".")[2] for name in self._layers})


def factor_names(model: nn.Module) -> dict[str, str]:
    """Return peft's names of the factors in a file, by their names in the model.

    `get_peft_model_state_dict` lacks the model's names, by which ranks save and load shards.
    """
    return {
        name: "base_model.model." + name.replace(".default.", ".")
        for name, _ in model.named_parameters()
        if _FACTOR.search(name)
    }


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Merge an adapter into its base's weights, sharded or not, which are rounded to `dtype` before.

    Raises:
        AdapterError: the folder's adapter does not fit this model.
    """
    saved, factors = read_config(folder), _read_factors(folder)
    params = dict(model.named_parameters())
    for param in params.values():
        param.copy_(param.to(dtype))
    for name, a in factors.items():
        if ".lora_A." not in name:
            continue
        module, b = name.removeprefix("base_model.model.").partition(".lora_A.")[0], factors.get(_other(name))
        weight = params.get(f"{module}.weight")
        if b is None or weight is None or weight.shape != (b.shape[0], a.shape[1]):
            raise AdapterError(f"{folder}: {name} is no factor of a weight of this model; is its base another?")
        product = (saved["lora_alpha"] / saved["r"]) * (b.double() @ a.double())
        weight.add_(place_like(product, weight))


def _begin(name: str, shape: torch.Size) -> Tensor:
    """Return initial values: B is zero, A is torch's initialization of a linear layer, seeded by the name alone."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def _placed(value: Tensor, param: Tensor) -> Tensor:
    if isinstance(param, DTensor):
        return place_like(value, torch.empty_like(param, device=param.device_mesh.device_type))
    return value.float()


def _read_factors(folder: Path) -> Mapping[str, Tensor]:
    try:
        factors: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder}: {WEIGHTS_FILE} cannot be read ({error})") from error
    return factors


def _other(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _excluded(model: nn.Module, patterns: str | list[str] | None) -> str | list[str] | None:
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(patterns, str):
        try:
            matching(patterns, names)
        except ValueError as error:
            if patterns != LoraConfig().exclude_modules:
                raise AdapterError(f"{_KEY}.exclude_modules: {error}") from error
            return None
    for end in patterns if isinstance(patterns, list) else ():
        _require_end("exclude_modules", end, names)
    return patterns


def _require_targets(targets: str | list[str], linear: list[str]) -> None:
    if isinstance(targets, list):
        for end in targets:
            _require_end("target_modules", end, linear)
    elif targets != "all-linear":
        try:
            matching(targets, linear)
        except ValueError as error:
            raise AdapterError(f"{_KEY}.target_modules: {error}") from error


def _require_end(key: str, end: str, names: list[str]) -> None:
    if not any(name == end or name.endswith(f".{end}") for name in names):
        near = ", ".join(nearest(end, names))
        raise AdapterError(f"{_KEY}.{key}: no module's name ends in {end!r}; similar names: {near}")
