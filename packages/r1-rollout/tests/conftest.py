"""Makes what the tests share importable by them; the tiny models as fixtures."""

import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parent))

from rollout_models import TEXT, sharpen, vision_config


@pytest.fixture
def text_model() -> Any:
    torch.manual_seed(0)
    return sharpen(Qwen2ForCausalLM(Qwen2Config(**TEXT)))


@pytest.fixture
def vision_model() -> Any:
    torch.manual_seed(0)
    return sharpen(Qwen2_5_VLForConditionalGeneration(vision_config(TEXT)))


@pytest.fixture
def checkpoint(text_model: Any, tmp_path: Path) -> Path:
    """A directory with the tiny text model and a tokenizer of 64 letters that has a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ?"
    model = tokenizers.models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=" ")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    fast.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="h")
    tokenizer.chat_template = "{% for m in messages %}U{{ m['content'] }}{% endfor %}A"
    tokenizer.save_pretrained(tmp_path)
    text_model.save_pretrained(tmp_path)
    return tmp_path
