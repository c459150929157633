"""The models of `rollout.py`, of random weights, and the prompts that they answer, with pictures of noise."""

from dataclasses import dataclass
from typing import Any

import torch

SIZES = {
    "tiny": (512, 128, 384, 3, 4, 2),
    "small": (4096, 512, 1536, 9, 8, 4),
    "vision": (512, 128, 384, 3, 4, 2),
}
MEDIA = IMAGE, VIDEO, VISION_START, VISION_END = 508, 509, 510, 511
SIDE = 112  # pixels of a picture: 8 × 8 patches, four to a token


@dataclass(frozen=True)
class Prompt:
    id: str
    token_ids: list[int]
    position_ids: torch.Tensor
    model_inputs: dict[str, torch.Tensor]
    picture: Any = None  # of which `model_inputs` are made, for a peer that makes its own


def make_model(name: str) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

    vocabulary, hidden, inner, layers, heads, kv_heads = SIZES[name]
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    if name != "vision":
        return Qwen2ForCausalLM(Qwen2Config(**text)).eval()
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": hidden}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def make_processor() -> Any:
    """The vision model's processor, which needs no download; its tokenizer has a word for each token."""
    from tokenizers import Tokenizer, models
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    words = ["<|endoftext|>", *(f"w{token}" for token in range(1, SIZES["vision"][0]))]
    for token, name in zip(MEDIA, ("image_pad", "video_pad", "vision_start", "vision_end"), strict=True):
        words[token] = f"<|{name}|>"
    vocabulary = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[1]))
    vocabulary.add_special_tokens([words[0], *(words[token] for token in MEDIA)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token=words[0], pad_token=words[0])
    pixels = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(size=pixels), tokenizer, Qwen2VLVideoProcessor(size=pixels))


def make_picture(generator: torch.Generator) -> Any:
    from PIL import Image

    return Image.fromarray(torch.randint(256, (SIDE, SIDE, 3), generator=generator, dtype=torch.uint8).numpy())


def make_prompts(model: Any, name: str, count: int, long: int = 0) -> list[Prompt]:
    """Prompts of 32 to 96 tokens, the first of `long` if given; of a vision model, 18 of them are a picture."""
    generator, prompts = torch.Generator().manual_seed(1), []
    processor = make_processor() if name == "vision" else None
    for index in range(count):
        length = int(torch.randint(32, 97, (), generator=generator))
        length = long if long and index == 0 else length
        token_ids: list[int] = torch.randint(1, 500, (length,), generator=generator).tolist()
        if processor is None:
            prompts.append(Prompt(f"{index}", token_ids, torch.arange(length)[None], {}))
            continue
        picture = make_picture(generator)
        media = dict(processor.image_processor([picture], return_tensors="pt"))
        grid = media["image_grid_thw"]
        token_ids[1:19] = [VISION_START, *[IMAGE] * 16, VISION_END]
        ids = torch.tensor([token_ids])
        rotary, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid)
        positions = torch.cat([torch.arange(length)[None], rotary[:, 0]])
        prompts.append(Prompt(f"{index}", token_ids, positions, media, picture))
    return prompts
