"""Puts the tokens of a prompt with media where the learner puts them, whatever vLLM would make of them itself.

The two do not always agree: behind a video of Qwen2.5-VL whose seconds reach further than its height and width, vLLM
goes on after the largest position so far, as the paper of M-RoPE has it (arXiv 2409.12191), transformers
5.19 after height and width. So each medium brings the positions of the whole prompt with it.
"""

from typing import Any

import torch
from torch import Tensor

BROUGHT = "{kind}_position_ids"  # name of the input, by kind of media: int64 [axes, prompt_length] each


def follow_positions(model: Any) -> None:
    """Let vLLM's `model`, of a kind with M-RoPE, take the positions that media bring."""
    own = model.get_mrope_input_positions

    def positions(input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        if not mm_features:
            return own(input_tokens, mm_features)
        feature = mm_features[0]
        return extended(feature.data[BROUGHT.format(kind=feature.modality)].data, len(input_tokens))

    model.get_mrope_input_positions = positions


def extended(positions: Tensor, length: int) -> tuple[Tensor, int]:
    """Return the positions [axes, prompt_length] of a prompt, and of an answer behind it up to `length` tokens in all.

    Also return by how much the answer's positions differ from the numbers of its tokens. A request that vLLM has put
    off comes back with what was answered by then.
    """
    after = int(positions.max()) + 1
    answer = torch.arange(after, after + length - positions.shape[1]).expand(len(positions), -1)
    return torch.cat([positions, answer], dim=1), after - positions.shape[1]
