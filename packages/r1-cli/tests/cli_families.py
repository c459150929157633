"""Tiny models of every family in which packs are compared, and samples with pictures and videos for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from r1_cli.models.attention import attend_packed
from r1_cli.models.families import configure_experts
from r1_cli.train.groups.group import extend_positions
from r1_core.types import Sample, join_inputs
from r1_data.positions import position_ids_of

VOCAB, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
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
    "qwen3-moe": (hf.Qwen3MoeForCausalLM, lambda: hf.Qwen3MoeConfig(**TEXT, **EXPERTS)),
}
VISION_FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2-vl": (hf.Qwen2VLForConditionalGeneration, lambda: vision_config(hf.Qwen2VLConfig, QWEN2_VISION)),
    "qwen2.5-vl": (hf.Qwen2_5_VLForConditionalGeneration, lambda: vision_config(hf.Qwen2_5_VLConfig, QWEN25_VISION)),
    "qwen3-vl": (hf.Qwen3VLForConditionalGeneration, lambda: vision_config(hf.Qwen3VLConfig, QWEN3_VISION)),
    "qwen3-vl-moe": (
        hf.Qwen3VLMoeForConditionalGeneration,
        lambda: vision_config(hf.Qwen3VLMoeConfig, QWEN3_VISION, **EXPERTS),
    ),
}
MIXTURES = ("qwen3-moe", "qwen3-vl-moe")
# The media of each row, as (kind, frames, height, width) in patches; a placeholder stands for four patches.
WIDE, TALL, SMALL, CLIP = ("image", 1, 4, 8), ("image", 1, 8, 4), ("image", 1, 4, 4), ("video", 2, 4, 8)
ROWS = {
    "pictures": [(WIDE,), (), (SMALL, TALL), (SMALL,), ()],
    "videos": [(CLIP, SMALL), (), (WIDE,), (CLIP,), ()],
}

Media = tuple[str, int, int, int]


def vision_config(config: Callable[..., Any], vision: dict[str, Any], **text: Any) -> Any:
    return config(
        text_config={**TEXT, "rope_parameters": M_ROPE, **text}, vision_config=vision, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip


def build(name: str, *, packed: bool, seed: int = 0, heads: int = 4) -> Any:
    model_class, make_config = (TEXT_FAMILIES | VISION_FAMILIES)[name]
    config = make_config()
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    text.num_attention_heads, text.hidden_size = heads, 8 * heads
    if vision is not None:
        setattr(vision, "hidden_size" if name == "qwen2-vl" else "out_hidden_size", 8 * heads)
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="sdpa")
    if packed:
        attend_packed(model)
    # Larger than at the start of a training, so that a token that sees another's picture shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    configure_experts(model.double(), torch.float64, torch.device("cpu"))
    return model


def placeholders(name: str, medium: Media) -> list[int]:
    kind, frames, height, width = medium
    token, count = {"image": IMAGE, "video": VIDEO}[kind], height * width // 4
    if name.startswith("qwen3-vl"):  # shows a video frame by frame, a time stamp before each
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


def make_groups(name: str, rows: Sequence[Sequence[Media]], config: Any) -> list[Sample]:
    """Groups of 3, 1, 4, 2, … answers of different lengths to the prompts of `make_samples`."""
    draw, samples = torch.Generator().manual_seed(3), []
    for group, one in enumerate(make_samples(name, rows, config)):
        start = len(one.token_ids) - (2 + 3 * group % 7)
        for answer in range((3, 1, 4, 2, 1)[group]):
            length = 1 + (5 * answer + 3 * group) % 9
            ids = torch.cat([one.token_ids[:start], torch.randint(0, 40, (length,), generator=draw)])
            samples.append(
                Sample(
                    ids, torch.arange(len(ids)) >= start, extend_positions(one.position_ids[:, :start], length),
                    group_id=group, reward=float(answer % 2), model_inputs=one.model_inputs, prompt_length=start,
                )
            )  # fmt: skip
    return samples


def make_episodes(name: str, rows: Sequence[Sequence[Media]], config: Any) -> list[Sample]:
    """Three episodes to each prompt of `make_samples`; in two, pictures follow a turn, and another turn them."""
    draw, position_ids, samples = torch.Generator().manual_seed(4), position_ids_of(config), []
    assert position_ids is not None
    for group, one in enumerate(make_samples(name, rows, config)):
        prompt = one.token_ids[: len(one.token_ids) - (2 + 3 * group % 7)]
        for number, media in enumerate(((TALL, SMALL), (), (SMALL,))):
            shown = [token for medium in media for token in placeholders(name, medium)]
            turn, last = (torch.randint(0, 40, (length,), generator=draw) for length in (2 + number, 4 - number))
            parts = [prompt, turn, torch.tensor([*shown, 9]), last] if media else [prompt, turn]
            ids = torch.cat(parts)
            later = model_inputs(name, media, draw)
            whole = {**join_inputs([one.model_inputs, later]), "mm_token_type_ids": kinds(ids)}
            trained = torch.cat([torch.full((len(part),), place % 2 == 1) for place, part in enumerate(parts)])
            samples.append(
                Sample(
                    ids, trained, position_ids(ids, whole), group_id=group, reward=float(number),
                    model_inputs=one.model_inputs, later_inputs=later, prompt_length=len(prompt),
                )
            )  # fmt: skip
    return samples


def kinds(token_ids: Tensor) -> Tensor:
    return (token_ids == IMAGE).int() + 2 * (token_ids == VIDEO).int()
