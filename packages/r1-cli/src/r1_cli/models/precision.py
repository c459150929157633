"""Which precision computes: the names that configurations use, and what the engines are given."""

import torch

from r1_cli.config import RunConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def engine_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the precision that an engine samples in. Processors compute in float32: half precision is slower there."""
    return DTYPES[config.worker.rollout.dtype] if device.type == "cuda" else torch.float32
