"""Packed, padded and one by one are the same to the learner, for every family that r1 trains, pictures and videos too.

The families' own position rules and r1's attention are used, as in a run. One by one, the model gets a sample as
Hugging Face means it to: torch's attention, no positions given, the model finds its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from r1_cli.groups.group import extend_positions
from r1_cli.models.attention import attend_packed
from r1_cli.models.load import is_vision_language
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_data.positions import position_ids_of

VOCAB, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
M_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
VISION: dict[str, Any] = {
    "depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN2_VISION = {**VISION, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
QWEN25_VISION = {
    **VISION, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16,
    "fullatt_block_indexes": [1], "tokens_per_second": 2,
}  # fmt: skip
QWEN3_VISION = {
    **VISION, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
PATCH_VALUES = 3 * 2 * 4 * 4
TEXT_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**TEXT)),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**TEXT)),
    "llama": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**TEXT)),
}
VISION_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2-vl": (hf.Qwen2VLForConditionalGeneration, lambda: vision_config(hf.Qwen2VLConfig, QWEN2_VISION)),
    "qwen2.5-vl": (hf.Qwen2_5_VLForConditionalGeneration, lambda: vision_config(hf.Qwen2_5_VLConfig, QWEN25_VISION)),
    "qwen3-vl": (hf.Qwen3VLForConditionalGeneration, lambda: vision_config(hf.Qwen3VLConfig, QWEN3_VISION)),
}
# The media of each row, as (kind, frames, height, width) in patches; a placeholder stands for four patches.
WIDE, TALL, SMALL, CLIP = ("image", 1, 4, 8), ("image", 1, 8, 4), ("image", 1, 4, 4), ("video", 2, 4, 8)
ROWS = {
    "pictures": [(WIDE,), (), (SMALL, TALL), (SMALL,), ()],
    "videos": [(CLIP, SMALL), (), (WIDE,), (CLIP,), ()],
}
CASES = [(name, "text") for name in TEXT_FAMILIES] + [(name, rows) for name in VISION_FAMILIES for rows in ROWS]

Media = tuple[str, int, int, int]


def vision_config(config: Callable[..., Any], vision: dict[str, Any]) -> Any:
    return config(
        text_config={**TEXT, "rope_parameters": M_ROPE}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip


def build(name: str, *, packed: bool) -> Any:
    model_class, config = (TEXT_FAMILIES | VISION_FAMILIES)[name]
    torch.manual_seed(0)
    model = model_class._from_config(config(), attn_implementation="sdpa")
    if packed:
        attend_packed(model)
    # Larger than at the start of a training, so that a token that sees another's picture shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.double()


def placeholders(name: str, medium: Media) -> list[int]:
    kind, frames, height, width = medium
    token, count = {"image": IMAGE, "video": VIDEO}[kind], height * width // 4
    if name == "qwen3-vl":  # shows a video frame by frame, a time stamp before each
        return [token_ for frame in range(frames) for token_ in (40 + frame, START, *[token] * count, END)]
    return [START, *[token] * (frames * count), END]


def model_inputs(name: str, media: Sequence[Media], draw: torch.Generator) -> dict[str, Tensor]:
    inputs = {}
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        grids = torch.tensor([medium[1:] for medium in media if medium[0] == kind])
        if len(grids):
            patches = int(grids.prod(-1).sum())
            inputs |= {pixels: torch.randn(patches, PATCH_VALUES, generator=draw).double(), grid: grids}
            if kind == "video" and name == "qwen2.5-vl":
                inputs["second_per_grid_ts"] = torch.full((len(grids),), 2.0)
    return inputs


def make_samples(name: str, rows: Sequence[Sequence[Media]], config: Any) -> list[Sample]:
    """Samples of different lengths, two groups, the last without trained tokens."""
    draw, position_ids, samples = torch.Generator().manual_seed(1), position_ids_of(config), []
    for i, media in enumerate(rows):
        prompt = torch.tensor([5, *[t for medium in media for t in placeholders(name, medium)], 7, *range(8, 8 + i)])
        answer = torch.randint(0, 40, (2 + 3 * i % 7,), generator=draw)
        inputs = model_inputs(name, media, draw)
        positions = torch.arange(len(prompt))[None]
        if position_ids is not None:
            positions = position_ids(prompt, {**inputs, "mm_token_type_ids": kinds(prompt)})
        length = len(prompt) + len(answer)
        trained = torch.arange(length) >= (len(prompt) if i < len(rows) - 1 else length)
        ids, positions = torch.cat([prompt, answer]), extend_positions(positions, len(answer))
        samples.append(Sample(ids, trained, positions, group_id=i // 2, reward=float(i % 2), model_inputs=inputs))
    return samples


def kinds(token_ids: Tensor) -> Tensor:
    return (token_ids == IMAGE).int() + 2 * (token_ids == VIDEO).int()


def logprobs_alone(model: Any, sample: Sample) -> Tensor:
    """Log-probs [L] of the trained tokens by a plain call of the model, 0 on the others."""
    inputs = dict(sample.model_inputs)
    if is_vision_language(model.config):
        inputs["mm_token_type_ids"] = kinds(sample.token_ids)[None]
    logits = model(input_ids=sample.token_ids[None], **inputs, use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(-1, sample.token_ids[1:, None]).squeeze(-1)
    return torch.where(sample.loss_mask, torch.cat([chosen.new_zeros(1), chosen]), 0.0)


def step(model: Any, samples: list[Sample], batching: Batching) -> tuple[Tensor, dict[str, Tensor]]:
    """Old log-probs of all tokens, and the gradient of a step with them."""
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    learner = Learner(model, optimizer, lambda step: 1.0, batching=batching)
    annotated = assign(learner.annotate(samples, ["old_logprobs"]), GRPO())
    model.zero_grad()
    learner.forward_backward(annotated, Objective(entropy_coef=0.1))
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return torch.cat([sample.old_logprobs for sample in annotated if sample.old_logprobs is not None]), grads


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_packed_is_padded_is_one_by_one(name: str, rows: str) -> None:
    model, plain = build(name, packed=True), build(name, packed=False)
    samples = make_samples(name, ROWS.get(rows, [()] * 5), plain.config)
    with torch.no_grad():
        expected_logprobs = torch.cat([logprobs_alone(plain, sample) for sample in samples])
    _, expected = step(plain, samples, Batching(False, MicroLimit(1), MicroLimit(1)))
    assert ("model.visual.patch_embed.proj.weight" in expected) == (rows != "text")
    for padding_free in (True, False):
        for limit in (MicroLimit(1), MicroLimit(2), MicroLimit(5)):
            logprobs, grads = step(model, samples, Batching(padding_free, limit, limit))
            # Hugging Face computes norms and rotations in float32 whatever the model's precision.
            torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-5)
            assert grads.keys() == expected.keys()
            for key, grad in grads.items():
                named = partial("{}: {}".format, key)
                torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-5, msg=named)


def test_a_sample_in_a_pack_does_not_see_its_neighbours_picture() -> None:
    name = "qwen3-vl"
    model, config = build(name, packed=True), VISION_FAMILIES[name][1]()
    samples = make_samples(name, [(SMALL,), (SMALL,), ()], config)
    other = make_samples(name, [(SMALL,), (SMALL,), ()], config)
    other[0].model_inputs["pixel_values"].mul_(-3)
    batching = Batching(True, MicroLimit(3), MicroLimit(3))
    (before, _), (after, _) = step(model, samples, batching), step(model, other, batching)
    own = len(samples[0].token_ids)
    assert float((before - after)[:own].abs().max()) > 1e-3
    torch.testing.assert_close(before[own:], after[own:], rtol=0, atol=1e-6)
