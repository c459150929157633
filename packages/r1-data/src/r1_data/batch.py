"""Prompts as one batch for a Hugging Face model's `forward` or `generate`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from r1_data.types import Prompt

if TYPE_CHECKING:
    from torch import Tensor


def collate(prompts: Sequence[Prompt], pad_token_id: int) -> "dict[str, Tensor]":
    """Pad prompts on their left to one length, and put their media one after the other.

    Returns:
        `input_ids` and `attention_mask`, int64 [B, L]; `position_ids`, int64 [B, L] for text models and [axes, B, L]
        for M-RoPE; and the model's other inputs, as the prompts hold them (`pixel_values`, `image_grid_thw`, …).

    Raises:
        ValueError: no prompts.
    """
    import torch

    if not prompts:
        raise ValueError("a batch needs at least one prompt")
    length = max(len(prompt.token_ids) for prompt in prompts)

    def padded(rows: "Tensor", value: int) -> "Tensor":
        return torch.nn.functional.pad(rows, (length - rows.shape[-1], 0), value=value)

    token_ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
    positions = torch.stack([padded(prompt.position_ids, 0) for prompt in prompts], dim=1)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.model_inputs)
    return {
        "input_ids": torch.stack([padded(ids, pad_token_id) for ids in token_ids]),
        "attention_mask": torch.stack([padded(torch.ones_like(ids), 0) for ids in token_ids]),
        "position_ids": positions[0] if len(positions) == 1 else positions,
        **{name: torch.cat([p.model_inputs[name] for p in prompts if name in p.model_inputs]) for name in names},
    }
