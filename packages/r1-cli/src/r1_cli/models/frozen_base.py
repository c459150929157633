"""The frozen base of an adapter: its path, digest, dtype and quantization."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from r1_cli.models.adapters import CONFIG_FILE, AdapterError
from r1_cli.models.families import find_value
from r1_core.learner.checkpoint import NUMBERS_FILE
from r1_rollout.weights import dtype_named

WHOLE_FILE = 64_000_000  # bytes up to which a file is read from beginning to end
BLOCKS, BLOCK = 256, 1 << 16
Quantization = Literal["nf4"]  # 4 bits at the quantiles of a normal distribution, scales in 8 bits
MISSING = "worker.actor.model.quantization=nf4 needs bitsandbytes: install r1-cli[qlora]"
# Heads and towers stay as they are: small beside the layers of text, and what adapters leave alone by default.
WHOLE = ["lm_head", "visual", "vision_tower", "multi_modal_projector"]


@dataclass(frozen=True, slots=True)
class Base:
    """A checkpoint's record of an adapter's base.

    Example: `Base("/models/Qwen2.5-0.5B", "9f8e…", "bfloat16")`.
    """

    name: str  # a folder's whole path, or a hub name
    digest: str
    dtype: str  # in which the adapter was trained on it
    quantization: str | None = None  # in how few bits its linear layers were kept then

    @classmethod
    def of(cls, path: str, dtype: torch.dtype, quantization: str | None = None) -> "Base":
        name = str(Path(path).resolve()) if Path(path).is_dir() else path
        return cls(name, digest(find_folder(path)), str(dtype).removeprefix("torch."), quantization)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)

    def as_dict(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def require_there(self) -> None:
        """Raise AdapterError unless the same weights are there."""
        try:
            found = digest(find_folder(self.name))
        except OSError as error:
            raise AdapterError(f"the adapter's base {self.name} is not there: {error}") from error
        if found != self.digest:
            raise AdapterError(
                f"the adapter's base {self.name} has other weights now ({found[:12]}…) than those that the adapter was "
                f"trained on ({self.digest[:12]}…)"
            )


def read_base(folder: str) -> Base | None:
    """Return the base of the adapter in a checkpoint; None if the folder has a model, or is a hub name.

    Raises:
        AdapterError: it has an adapter that r1 has not written.
    """
    if not (Path(folder) / CONFIG_FILE).is_file():
        return None
    try:
        numbers: dict[str, dict[str, str]] = json.loads((Path(folder) / NUMBERS_FILE).read_text(encoding="utf-8"))
        return Base(**numbers["base"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"{folder} holds an adapter, and its {NUMBERS_FILE} does not name the base ({error!r}); set "
            "worker.actor.model.model_path to the base and worker.actor.model.lora.path to this folder"
        ) from error


def find_folder(path: str) -> Path:
    """Return a folder itself, or the folder of a hub name's files on this machine.

    Raises:
        OSError: they are not on this machine.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True, allow_patterns=["*.safetensors"]))


def digest(folder: Path, *, adapters: bool = False) -> str:
    """Return SHA-256 over a folder's safetensors files, with or without those of adapters: names, sizes and contents.

    Of files above `WHOLE_FILE` it reads the beginning, with names and shapes, and evenly spread blocks: training
    changes nearly all weights, and reading 100 GB takes minutes.
    """
    total = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        if file.name.startswith("optimizer" if adapters else ("optimizer", "adapter_model")):
            continue
        size = file.stat().st_size
        total.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_FILE:
                total.update(stream.read())
                continue
            total.update(stream.read(1 << 20))
            for block in range(BLOCKS):
                stream.seek(block * (size - BLOCK) // (BLOCKS - 1))
                total.update(stream.read(BLOCK))
    return total.hexdigest()


# --- 4 bits: QLoRA (arXiv 2305.14314). NOT RUN ON A GPU; bitsandbytes computes on processors, too --------------------


def quantization_options(dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Return the options of `from_pretrained` that keep linear layers in 4 bits and compute in `dtype` on `device`.

    Raises:
        ImportError: bitsandbytes is missing.
    """
    if not find_spec("bitsandbytes"):
        raise ImportError(MISSING)
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends kernels
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=WHOLE,
    )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def use_training_kernels(model: Any) -> None:
    """Make bitsandbytes compute the same on processors in evaluation as in training.

    Some processors repack weights for bfloat16 products, which not all shapes support.
    """
    for module in model.modules():
        if find_value(module, "support_avx512bf16_for_cpu") is not None:
            module.support_avx512bf16_for_cpu = False


def dequantize(model: Any, dtype: torch.dtype) -> Any:
    """Return the model with the values of its 4 bits as plain weights in `dtype`."""
    plain = model.dequantize(dtype)
    if find_value(plain.config, "quantization_config") is not None:
        del plain.config.quantization_config  # it would be saved, and weights read for what they are not
    return plain
