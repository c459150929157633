"""What the tests of r1-data share: tiny tokenizers and processors of each family, and real pictures."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

sys.path.insert(0, str(Path(__file__).parent))  # for helpers that worker processes import, too
from data_models import tiny_config

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for item in message.content %}
{%- if item.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif item.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ item.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if thinking %}{{ '<think>' }}{% endif %}{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte, with the special tokens and the chat template of the Qwen-VL families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor(family: str, folder: Path) -> Any:
    """A processor of one family, saved to `folder` and loaded again as a user's would be."""
    processor_class, video_class, patch = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor, 14),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, 14),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor, 16),
    }[family]
    image_processor = Qwen2VLImageProcessor(patch_size=patch, min_pixels=28 * 28, max_pixels=280 * 280)
    video_processor = video_class(patch_size=patch)
    processor = processor_class(image_processor, make_tokenizer(), video_processor, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(folder)
    tiny_config(family, processor).save_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Qwen2.5-VL processor; tests do not change it."""
    return make_processor("qwen2_5_vl", tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="session")
def fresh_processor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Makes a processor of a named family that the test may change."""
    return lambda family: make_processor(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """Encodes a picture of (width, height), each pixel different from its neighbours: `picture(60, 40, "JPEG")`."""

    def encode(width: int, height: int, kind: str = "PNG", **options: Any) -> bytes:
        horizontal = Image.linear_gradient("L").resize((width, height))
        vertical = Image.linear_gradient("L").rotate(90).resize((width, height))
        buffer = io.BytesIO()
        Image.merge("RGB", (horizontal, vertical, horizontal)).save(buffer, kind, **options)
        return buffer.getvalue()

    return encode


@pytest.fixture(scope="session")
def movie() -> Callable[..., bytes]:
    """Encodes a video of (width, height, frames), the frames growing brighter: `movie(64, 48, 20, fps=10)`."""

    def encode(width: int, height: int, frames: int, *, fps: int = 10, kind: str = "mp4") -> bytes:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=kind) as container:
            stream = container.add_stream("mpeg4", rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for index in range(frames):
                pixels = np.full((height, width, 3), 20 + index * 200 // frames, np.uint8)
                pixels[: height // 2, : width // 2, 0] = 255
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            container.mux(stream.encode())
        return buffer.getvalue()

    return encode
