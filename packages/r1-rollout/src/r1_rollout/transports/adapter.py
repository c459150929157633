"""Weight transfer of a LoRA adapter alone: factors in a file of PEFT's format, which vLLM loads."""

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.private_folder import PrivateFolder
from r1_rollout.transports.folder import UNSEEN, new_folder
from r1_rollout.types import JsonObject
from r1_rollout.weights import Shapes, Weights, WeightSource

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

WEIGHTS_FILE = "adapter_model.safetensors"
LAYER = re.compile(r"(?:layers|blocks)\.\d+\..+")  # what names have in common on both sides


def write_source(source: WeightSource, folder: Path) -> Shapes:
    """Write an adapter into a new `folder`, by the process that has its factors; return their shapes by name.

    Raises:
        WeightsError: the adapter is empty.
        OSError: the process cannot write, or does not see the folder.
    """
    with new_folder(folder) as draft:
        return source.run_with_weights(partial(_write_seen, folder=draft))


def _write_seen(weights: Weights, folder: Path) -> Shapes:
    assert isinstance(weights, Adapter)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} {UNSEEN}")
    try:
        return write_adapter(weights, folder)
    except ValueError as error:
        raise WeightsError(str(error)) from error


def load_adapter(llm: "LLM", adapter: Adapter, version: int) -> "LoRARequest":
    """Let vLLM replace its adapter; return the request that names it.

    Raises:
        ValueError: the adapter is empty, or vLLM's model has no module for a part of it.
    """
    from vllm.lora.request import LoRARequest

    for old in llm.llm_engine.list_loras():
        llm.llm_engine.remove_lora(old)
    with PrivateFolder("r1-adapter-") as folder:
        names = write_adapter(adapter, folder)
        request = LoRARequest(f"version-{version}", version + 1, str(folder))
        llm.llm_engine.add_lora(request)
    check_bound(names, llm.apply_model(adapted_modules)[0])
    return request


def write_adapter(adapter: Adapter, folder: Path) -> Shapes:
    """Write `adapter` into `folder` as PEFT does; return its tensors' shapes. Raises ValueError if it is empty."""
    from safetensors.torch import save_file

    tensors = {peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in adapter.weights}
    if not tensors:
        raise ValueError("the adapter holds no weights")
    save_file(tensors, str(folder / WEIGHTS_FILE))
    (folder / "adapter_config.json").write_text(json.dumps(_config(adapter)))
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def written_names(folder: str | Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(Path(folder) / WEIGHTS_FILE, framework="pt") as file:
        return list(file.keys())


def peft_name(name: str) -> str:
    """Return a name as PEFT writes it into files, without the adapter's own name in it."""
    name = re.sub(r"\.lora_([AB])\.[^.]+\.weight$", r".lora_\1.weight", name)
    return name if name.startswith("base_model.model.") else f"base_model.model.{name}"


def check_bound(names: Iterable[str], modules: Iterable[str]) -> None:
    """Raise ValueError for adapter weights of unknown modules, which vLLM would ignore."""
    known = {_layer(module) for module in modules}
    lost = sorted({module for name in names if _layer(module := name.rsplit(".lora_", 1)[0]) not in known})
    if lost:
        shown = ", ".join(lost[:5]) + (", …" if len(lost) > 5 else "")
        raise ValueError(f"the adapter would be bound to nothing: vLLM's model has no {shown}")


def adapted_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that take adapters; fused ones by their parts."""
    from vllm.lora.layers import BaseLayerWithLoRA

    fused = getattr(model, "packed_modules_mapping", {})
    names = []
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            parent, _, last = name.rpartition(".")
            names += [f"{parent}.{part}" for part in fused.get(last, [last])]
    return names


def _layer(name: str) -> str:
    found = LAYER.search(name)
    return found.group() if found else name


def _config(adapter: Adapter) -> JsonObject:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
    }
