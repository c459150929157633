"""Attention and log-probs on a device, against their definitions in float64 on the CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from r1_cli.models.attention import packed_attention, vision_attention
from r1_core.learner.linear_head import HeadSettings, token_stats

LENGTHS = [37, 1, 64, 90]  # tokens of a row's sequences
HEADS, KEY_HEADS = 4, 2
TOKENS, HIDDEN, VOCABULARY = 50, 64, 1000


def check_attention(device: torch.device, dtype: torch.dtype, size: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Attend causally over a packed row with heads of `size`; return outputs and gradients, by device and CPU."""
    query, key, value, slope = _draw(dtype, size, KEY_HEADS)
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    module: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KEY_HEADS, training=True)

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = inputs
        return packed_attention(
            module, query, key, value, None, position_ids=places[None].to(device), sliding_window=window
        )[0]

    apart = places[:, None] - places  # within a sequence, how far back a key is
    visible = _same_sequence() & (apart >= 0) & (apart < (window or sum(LENGTHS)))
    return _compare(device, attend, visible, (query, key, value), slope)


def check_tower(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attend in both directions within pictures, as a vision tower with heads of 80."""
    query, key, value, slope = _draw(dtype, 80, HEADS)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=device)
    module: Any = SimpleNamespace(is_causal=False, num_key_value_groups=1, training=True)

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = inputs
        bounds: Any = {"cu_seq_lens_q": ends, "max_length_q": max(LENGTHS)}
        return vision_attention(module, query, key, value, None, **bounds, scaling=80**-0.5)[0]

    return _compare(device, attend, _same_sequence(), (query, key, value), slope)


def check_head(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Take log-probs under a linear head, and their gradients."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw).to(dtype)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=draw) * HIDDEN**-0.5).to(dtype)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    slope = torch.randn(TOKENS, generator=draw, dtype=torch.float64)
    own, exact_inputs = _leaves((hidden, weight), device)
    found = token_stats(own[0], own[1], None, targets.to(device), HeadSettings(dtype))[:, 0]
    exact = (exact_inputs[0] @ exact_inputs[1].t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return _join(found, own, exact, exact_inputs, slope)


def _draw(dtype: torch.dtype, size: int, key_heads: int) -> list[Tensor]:
    """Return query, key, value [1, heads, T, size] and the gradient of the output [1, T, heads, size]."""
    draw, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = *((1, heads, total, size) for heads in (HEADS, key_heads, key_heads)), (1, total, HEADS, size)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def _same_sequence() -> Tensor:
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return number[:, None] == number


def _compare(
    device: torch.device, attend: Callable[..., Tensor], visible: Tensor, inputs: tuple[Tensor, ...], slope: Tensor
) -> tuple[Tensor, Tensor]:
    own, exact_inputs = _leaves(inputs, device)
    query, key, value = exact_inputs
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return _join(attend(*own), own, (scores.softmax(-1) @ value).transpose(1, 2), exact_inputs, slope)


def _leaves(inputs: tuple[Tensor, ...], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies on the device, and in float64 on the CPU, which get gradients."""
    own = [tensor.clone().to(device).requires_grad_() for tensor in inputs]
    return own, [tensor.double().requires_grad_() for tensor in inputs]


def _join(
    found: Tensor, own: list[Tensor], exact: Tensor, exact_inputs: list[Tensor], slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs and the inputs' gradients in one row each, as shares of the largest number of each tensor."""
    found.backward(slope.to(found))
    exact.backward(slope.to(exact))
    pairs = [(found, exact), *zip((one.grad for one in own), (one.grad for one in exact_inputs), strict=True)]
    rows = [
        (here.detach().double().cpu().flatten() / there.abs().max(), there.detach().flatten() / there.abs().max())
        for here, there in pairs
        if here is not None and there is not None
    ]
    return torch.cat([here for here, _ in rows]), torch.cat([there for _, there in rows])
