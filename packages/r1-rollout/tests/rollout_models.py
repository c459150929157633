"""Tiny random models: a Qwen2 and a Qwen2.5-VL that fit in a test, and a tokenizer of letters."""

from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ?"

TEXT = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def sharpen(model: Any) -> Any:
    """Scale random weights up, so that the tiny model has opinions instead of a flat distribution."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model.eval()


def make_tokenizer() -> Any:
    """A tokenizer of 64 letters, one token each, with a chat template."""
    model = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" ")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="h")
    tokenizer.chat_template = "{% for m in messages %}U{{ m['content'] }}{% endfor %}A"
    return tokenizer


def vision_config(text: dict[str, Any]) -> Any:
    """A Qwen2.5-VL around a text model's sizes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 48,
            "fullatt_block_indexes": [1],
        },
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
