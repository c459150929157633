"""Makes what the tests share importable by them; the tiny models as fixtures."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

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
