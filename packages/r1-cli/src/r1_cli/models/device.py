"""What a device can do and what a model asks of it, for MFU."""

import torch
from torch import nn

# Dense bf16 tensor-core peaks in FLOP/s from the makers' data sheets. The first name found in the device's wins, so
# that "H200" is never taken for "H20".
PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak, or None if it is not known: an unknown peak is no reason to report a wrong MFU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


def flops_per_token(model: nn.Module) -> float:
    """Return the FLOPs of one token's forward and backward pass, 6 per weight (arXiv 2001.08361, section 2.1).

    Embedding tables are looked up, not multiplied, and attention's own products are left out, so this is a lower bound.
    """
    embedded = sum(p.numel() for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
    return 6.0 * (sum(p.numel() for p in model.parameters()) - embedded)
