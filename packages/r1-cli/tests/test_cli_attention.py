"""A packed row attends as its sequences do alone, forwards and backwards, for every family that r1 trains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from r1_cli.models.attention import PACKED_ATTENTION

TEXT: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
    "mistral with a window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**TEXT, sliding_window=3)),
}
LENGTHS = [5, 1, 9, 3]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES.keys())
def test_a_pack_equals_its_sequences_one_by_one(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    sequences = [torch.randint(0, 50, (1, length)) for length in LENGTHS]
    weights = [torch.randn(1, length, 50).double() for length in LENGTHS]
    alone = [model(input_ids=ids).logits for ids in sequences]
    sum((logits * w).sum() for logits, w in zip(alone, weights, strict=True)).backward()
    expected = gradients(model)
    model.zero_grad()

    model.set_attn_implementation(PACKED_ATTENTION)
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = model(input_ids=torch.cat(sequences, dim=1), position_ids=position_ids, use_cache=False).logits
    (packed * torch.cat(weights, dim=1)).sum().backward()
    # Hugging Face computes norms and rotations in float32 whatever the model's precision.
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_cut_follows_the_positions_of_every_call() -> None:
    torch.manual_seed(0)
    model = FAMILIES["qwen2"]().eval()
    model.set_attn_implementation(PACKED_ATTENTION)
    ids, one = torch.randint(0, 50, (1, 8)), torch.arange(8)[None]
    two = torch.cat([torch.arange(5), torch.arange(3)])[None]

    def logits(position_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        return found

    whole, cut = logits(one), logits(two)
    assert not torch.allclose(whole[:, 5:], cut[:, 5:])
    one.copy_(two)  # the same tensor with other positions in it
    assert torch.equal(logits(one), cut)


def test_a_padded_batch_keeps_its_mask() -> None:
    torch.manual_seed(0)
    model = FAMILIES["qwen2"]().eval()
    ids, mask = torch.randint(0, 50, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    expected = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation(PACKED_ATTENTION)
    actual = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-6, atol=1e-6)
