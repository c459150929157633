"""Mixtures of experts: how the experts are computed, and what their router is not trained by."""

from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

# What families call the number of their experts.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def count_experts(config: Any) -> int:
    """Return how many experts a layer of the model has among which tokens choose, 0 if its layers have none."""
    text = config.get_text_config()
    return max(getattr(text, name, None) or 0 for name in COUNTS)


def describe_router(config: Any) -> str | None:
    """Say what the router is not trained by, None without one."""
    if not count_experts(config):
        return None
    weight = getattr(config.get_text_config(), "router_aux_loss_coef", None)
    named = "" if weight is None else f" (router_aux_loss_coef={weight:g} of its configuration)"
    return f"{config.model_type}: the policy's loss alone trains the router, its auxiliary loss{named} is off"


def configure_experts(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Let one product compute all experts where torch has it for this precision, else one after another.

    The router's statistics, of which an auxiliary loss would be made, are not kept.

    Args:
        dtype: of the products.
    """
    if not count_experts(model.config):
        return
    # Families with experts of their own (Llama 4, JetMoe, Doge, Kimi) cannot be told how to compute them.
    with suppress(ValueError):
        model.set_experts_implementation("grouped_mm" if has_grouped_product(dtype, device) else "eager")
    model.config.get_text_config().output_router_logits = False


def has_grouped_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch multiplies several matrices by the rows of each at once, forwards and backwards: it is tried."""
    product = getattr(torch.nn.functional, "grouped_mm", None)
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
