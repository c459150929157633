"""Tiny random models: a Qwen2 and a Qwen2.5-VL that fit in a test; makes the test servers importable."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

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
    torch.set_num_threads(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model.eval()


@pytest.fixture
def text_model() -> Any:
    torch.manual_seed(0)
    return sharpen(Qwen2ForCausalLM(Qwen2Config(**TEXT)))


@pytest.fixture
def vision_model() -> Any:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
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
    return sharpen(Qwen2_5_VLForConditionalGeneration(config))
