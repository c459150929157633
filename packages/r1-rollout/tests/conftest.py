"""Makes what the tests share importable by them; the tiny models as fixtures."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from rollout_models import TEXT, make_tokenizer, sharpen, vision_config
from server_pools import Pools


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
    make_tokenizer().save_pretrained(tmp_path)
    text_model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def pools() -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(stack)
