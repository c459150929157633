"""Tiny random models and samples for the learner's tests, and a way to run the models wholly in float64."""

from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from r1_core.types import Sample

VOCAB, IMAGE_TOKEN, VISION_START, VISION_END = 64, 60, 61, 62
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
PATCH_VALUES = 3 * 2 * 4 * 4


def attend_as_told(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more):
    """Attention by the definition of a row: `Pack.visible`."""
    pack = more.pop("pack", None)
    mask = mask if pack is None else pack.visible()[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, **more)


AttentionInterface.register("as_told", attend_as_told)
AttentionMaskInterface.register("as_told", sdpa_mask)


def reads_pack(model: nn.Module) -> nn.Module:
    """Let a model attend as the pack of a row says, so that its samples may share prompts."""
    named = ("", *(name for name in model.config.sub_configs if name != "vision_config"))
    model.set_attn_implementation(dict.fromkeys(named, "as_told"))
    model.reads_pack = True
    return model


def qwen2(seed: int = 0, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    config = Qwen2Config(**TEXT, tie_word_embeddings=tied, attn_implementation="sdpa")
    return Qwen2ForCausalLM(config)


def qwen25_vl(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=VISION,
        image_token_id=IMAGE_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return Qwen2_5_VLForConditionalGeneration(config)


class DoubleNorm(nn.Module):
    """RMSNorm in the dtype of its input; the models' own rounds to float32 on the way."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


def _rotate_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = modeling_qwen2_5_vl.rotate_half
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def in_float64(model: nn.Module, monkeypatch) -> nn.Module:
    """Turn a model into one that never rounds to float32, so that equality can be asked for to 1e-10."""
    monkeypatch.setattr(modeling_qwen2_5_vl, "apply_rotary_pos_emb_vision", _rotate_vision)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, DoubleNorm(child))
    return model.double()


def text_samples(lengths=((3, 4), (5, 1), (2, 6), (4, 3), (6, 2)), seed: int = 1) -> list[Sample]:
    """Samples of (prompt, answer) lengths in two groups; the last has no trained token, the third a hole."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i, (prompt, answer) in enumerate(lengths):
        length = prompt + answer
        mask = torch.arange(length) >= prompt
        if i == 2:
            mask[prompt + 1] = False
        if i == len(lengths) - 1:
            mask[:] = False
        tokens = torch.randint(0, 50, (length,), generator=generator)
        reward = float(torch.rand((), generator=generator))
        samples.append(Sample(tokens, mask, torch.arange(length)[None], group_id=i % 2, reward=reward))
    return samples


def with_siblings(samples: list[Sample]) -> list[Sample]:
    """The samples, and other answers to the prompts of the first, which gets two, and the third."""
    told = [replace(sample, prompt_length=int(sample.loss_mask.long().argmax())) for sample in samples]
    siblings = []
    for i, (one, longer) in enumerate([(told[0], 0), (told[2], 3), (told[0], 5)]):
        length = len(one.token_ids) + longer
        tokens = torch.cat([one.token_ids, torch.arange(longer) + 7 * i])
        tokens[one.prompt_length :] = (tokens[one.prompt_length :] + 1 + i) % 50
        last = one.position_ids[:, -1:] + 1 + torch.arange(longer)
        siblings.append(
            replace(
                one, token_ids=tokens, loss_mask=torch.arange(length) >= one.prompt_length,
                position_ids=torch.cat([one.position_ids, last], 1), reward=one.reward + i,
            )
        )  # fmt: skip
    return [*told, *siblings]


def loud(model: nn.Module, factor: float = 3.0) -> nn.Module:
    """The model with its matrices times a factor, so that it has opinions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(factor)
    return model


def preference_samples() -> list[Sample]:
    """Three pairs of answers of unequal lengths, each pair with a prompt in common."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for pair in range(3):
        prompt = torch.randint(0, 50, (4 + 3 * pair,), generator=generator)
        for side in range(2):
            answer = torch.randint(0, 50, (3 + 4 * side + pair,), generator=generator)
            token_ids = torch.cat([prompt, answer])
            mask = torch.arange(len(token_ids)) >= len(prompt)
            positions = torch.arange(len(token_ids))[None]
            samples.append(Sample(token_ids, mask, positions, pair, 0.0, prompt_length=len(prompt)))
    return samples


class Fetched(UserDict[str, Tensor]):
    """Model inputs that are elsewhere until one is read; remembers which were."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self.read: list[str] = []
        super().__init__(inputs)

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.data[name]


@cache
def _rope_model() -> nn.Module:
    return qwen25_vl()


def picture_samples(pictures=(1, 1, 2, 0, 1), seed: int = 1) -> list[Sample]:
    """Samples with that many pictures (four placeholders each) in the prompt; the first two may share theirs."""
    generator = torch.Generator().manual_seed(seed)
    samples, shared = [], {}
    for i, number in enumerate(pictures):
        picture = [VISION_START, *[IMAGE_TOKEN] * 4, VISION_END]
        prompt = [5, *picture * number, 7 + (0 if i < 2 else i)]
        answer = torch.randint(0, 50, (2 + i,), generator=generator).tolist()
        tokens = torch.tensor(prompt + answer)
        mask = torch.arange(len(tokens)) >= len(prompt)
        inputs = {}
        if number:
            grid = torch.tensor([[1, 4, 4]] * number)
            inputs = {
                "pixel_values": torch.randn(16 * number, PATCH_VALUES, generator=generator).double(),
                "image_grid_thw": grid,
            }
        if i == 0:
            shared = inputs
        elif i == 1 and number == pictures[0]:
            inputs = shared
        types = (tokens == IMAGE_TOKEN).int()[None]
        axes, _ = _rope_model().model.get_rope_index(
            tokens[None], types, image_grid_thw=inputs.get("image_grid_thw"), attention_mask=None
        )
        positions = torch.cat([torch.arange(len(tokens))[None], axes[:, 0]])
        reward = float(torch.rand((), generator=generator))
        samples.append(Sample(tokens, mask, positions, group_id=min(i, 3) // 2, reward=reward, model_inputs=inputs))
    return samples
