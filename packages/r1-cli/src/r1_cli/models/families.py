"""What model families have and lack: values of configurations and processors, vision towers, mixtures of experts."""

from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from r1_rollout.routing import Routing, count_experts


def find_value(holder: Any, name: str) -> Any:
    """Return an attribute of a configuration, processor or module of Hugging Face that not all families have, or None.

    Aliases of a configuration, such as GPT-2's `n_positions`, are resolved.
    """
    return getattr(holder, name, None)


def is_vision_language(config: PreTrainedConfig) -> bool:
    return find_value(config, "vision_config") is not None


def describe_router(config: PreTrainedConfig) -> str | None:
    """Return a note about the router's auxiliary loss, None without a router."""
    if not count_experts(config):
        return None
    weight = find_value(config.get_text_config(), "router_aux_loss_coef")
    named = "" if weight is None else f" (router_aux_loss_coef={weight:g} of its configuration)"
    return f"{config.model_type}: the policy's loss alone trains the router, its auxiliary loss{named} is off"


def configure_experts(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Compute all experts by one grouped product where torch has it for `dtype`, else one after another.

    The router's statistics for an auxiliary loss are not returned. Its choices can be recorded and replayed.
    """
    if Routing.of(model) is None:
        return
    # Families with experts of their own (Llama 4, JetMoe, Doge, Kimi) cannot be told how to compute them.
    with suppress(ValueError):
        model.set_experts_implementation("grouped_mm" if has_grouped_product(dtype, device) else "eager")
    model.config.get_text_config().output_router_logits = False


def has_grouped_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Try whether torch has a grouped matrix product, forward and backward, for this dtype and device."""
    product = find_value(torch.nn.functional, "grouped_mm")
    if product is None:
        return False
    rows, ends = torch.ones(16, 16, dtype=dtype, device=device), torch.tensor([8, 16], device=device)
    matrices = torch.ones(2, 16, 16, dtype=dtype, device=device, requires_grad=True)
    try:
        found = product(rows, matrices, offs=ends.int())
        found.backward(torch.ones_like(found))
    except (RuntimeError, NotImplementedError):  # what torch says of a precision or a device
        return False
    return True
