"""Prefill: a batch of prompts of different lengths, with pictures, through the model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from r1_rollout.types import PromptLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROMPTS = 16  # per forward; with _TOKENS it bounds the logits and activations
_SHORT = 64  # tokens: such prompts go together whatever their lengths
_TOKENS = 16384  # per forward, padding included, unless one prompt alone has more


def prefill_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Return batches of indices in which no prompt is more than twice as long as another."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = batches[-1] if batches else []
        longest = lengths[batch[0]] if batch else 0
        alike = longest <= max(2 * lengths[index], _SHORT)
        if batch and alike and len(batch) < _PROMPTS and (len(batch) + 1) * longest <= _TOKENS:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def alike(inputs: Sequence[Mapping[str, Tensor]]) -> list[list[int]]:
    """Return the indices of inputs that can be concatenated: those of one name agree in all but their first axis."""
    parts: list[tuple[list[int], dict[str, tuple[int, ...]]]] = []
    for index, one in enumerate(inputs):
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in one.items()}
        for indices, kind in parts:
            if all(kind.get(name, shape) == shape for name, shape in shapes.items()):
                indices.append(index)
                kind.update(shapes)
                break
        else:
            parts.append(([index], shapes))
    return [indices for indices, _ in parts]


def prefill(
    model: "PreTrainedModel", prompts: Sequence[PromptLike], inputs: Sequence[Mapping[str, Tensor]], filler: int
) -> tuple[DynamicCache, Tensor]:
    """Run prompts, padded on the right, through the model.

    Args:
        inputs: further arguments of the forward for each prompt, see `alike`.
        filler: the token to pad with; not a placeholder of media, for those are counted.

    Returns:
        Keys and values of the padded prompts, and the logits [prompts, vocabulary] after each prompt.
    """
    device, lengths = model.device, [len(prompt.token_ids) for prompt in prompts]
    rotary = [rotary_axes(prompt.position_ids) for prompt in prompts]
    token_ids = torch.full((len(prompts), max(lengths)), filler)
    position_ids = torch.zeros(len(rotary[0]), len(prompts), max(lengths), dtype=torch.int64)
    for row, (prompt, positions) in enumerate(zip(prompts, rotary, strict=True)):
        token_ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
        position_ids[:, row, : lengths[row]] = positions
    media = {
        name: torch.cat([one[name] for one in inputs if name in one]).to(device)
        for name in sorted({name for one in inputs for name in one})
    }
    ends, cache = sorted({length - 1 for length in lengths}), DynamicCache()
    logits = model(
        input_ids=token_ids.to(device),
        position_ids=without_lone_axis(position_ids).to(device),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=torch.tensor(ends, device=device),
        **media,
    ).logits
    return cache, logits[range(len(prompts)), [ends.index(length - 1) for length in lengths]]


def rotary_axes(position_ids: Tensor) -> Tensor:
    """Drop M-RoPE's text axis, which only tells packed sequences apart: [axes, length] -> [1 or axes - 1, length]."""
    return position_ids[1:] if len(position_ids) > 1 else position_ids


def without_lone_axis(position_ids: Tensor) -> Tensor:
    """Drop a single axis: models without M-RoPE take [batch, length]."""
    return position_ids[0] if len(position_ids) == 1 else position_ids
