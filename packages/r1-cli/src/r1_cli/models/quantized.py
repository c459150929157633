"""A frozen base in 4 bits under an adapter (QLoRA, arXiv 2305.14314), and the same numbers as a model without them.

NOT RUN ON A GPU; bitsandbytes computes on processors, too.
"""

import logging
from importlib.util import find_spec
from typing import Any, Literal

import torch

Quantization = Literal["nf4"]  # 4 bits at the quantiles of a normal distribution, scales in 8 bits
MISSING = "worker.actor.model.quantization=nf4 needs bitsandbytes: install r1-cli[qlora]"
# Heads and towers stay as they are: small beside the layers of text, and what adapters leave alone by default.
WHOLE = ["lm_head", "visual", "vision_tower", "multi_modal_projector"]


def quantized_choices(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return what `from_pretrained` takes to keep linear layers in 4 bits and compute in `dtype` on `device`.

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


def compute_alike(model: Any) -> None:
    """Let bitsandbytes compute on processors in evaluation what it does in training.

    Else some processors would pack the weights anew for a product in bfloat16, which not all shapes have.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def restore_digits(model: Any, dtype: torch.dtype) -> Any:
    """Return the model with plain weights that have the values of its 4 bits, in `dtype`."""
    plain = model.dequantize(dtype)
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config  # it would be saved, and weights read for what they are not
    return plain
