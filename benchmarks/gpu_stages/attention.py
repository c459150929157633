"""Ways to attend over a packed row: equal numbers, and the time of a forward and backward pass."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
import transformers

from gpu_stages.bench import Bench, Row, seconds
from r1_cli.models.attention import packed_attention


def measure(bench: Bench) -> Iterator[Row]:
    shapes = (
        [(4, 2, 16, [5, 9, 2])]
        if bench.tiny
        else [(28, 4, 128, [512] * 32), (28, 4, 128, [4096] * 4), (28, 4, 128, [257, 3, 8000, 1024, 40] * 3)]
    )
    yield from (row for shape in shapes for row in _ways(bench, *shape))


def _ways(bench: Bench, heads: int, key_heads: int, size: int, lengths: list[int]) -> list[Row]:
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    draw = torch.Generator(bench.kind).manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, n, total, size, generator=draw, device=bench.kind, dtype=dtype).requires_grad_()
        for n in (heads, key_heads, key_heads)
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(bench.kind)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=heads // key_heads, training=True)
    exact = _exact(query, key, value, lengths)
    ways = {
        "r1_packed": lambda: packed_attention(module, query, key, value, None, position_ids=positions)[0],
        "pieces": lambda: _by_pieces(query, key, value, lengths),
    }
    if bench.kind == "cuda" and transformers.utils.is_flash_attn_2_available():
        flash = transformers.AttentionInterface()["flash_attention_2"]
        ways["flash-attn"] = lambda: flash(module, query, key, value, None, position_ids=positions)[0]
    rows = []
    for name, way in ways.items():
        error = (way().double() - exact).abs().max().item()
        taken = seconds(bench, lambda way=way: way().sum().backward())
        shape = f"{len(lengths)} sequences, {total} tokens, {heads}/{key_heads} heads"
        rows.append({"row": shape, "way": name, "largest error": error, "forward and backward ms": taken * 1e3})
    return rows


@torch.no_grad()
def _exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Attend in float64, the queries of one key head at a time: no kernel is fused, so all scores are stored."""
    groups, parts = query.shape[1] // key.shape[1], []
    for head in range(key.shape[1]):
        own, of_keys = query[:, groups * head : groups * (head + 1)], slice(head, head + 1)
        parts.append(_by_pieces(own.double(), key[:, of_keys].double(), value[:, of_keys].double(), lengths))
    return torch.cat(parts, dim=2)


def _by_pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*piece, is_causal=True, enable_gqa=True) for piece in pieces], dim=2).transpose(1, 2)
