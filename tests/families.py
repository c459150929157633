"""Tiny random models of every family that r1 trains, with their tokenizers and processors; nothing is downloaded.

Heads are 32 wide, the smallest that every engine takes. The tokenizer has one token a byte.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXT_FAMILIES = ("qwen2", "qwen3", "llama")
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Further ones that only the learner's tests go through: experts, windows, layers whose state runs through a row.
FURTHER_TEXT = ("qwen3_moe", "gemma3_text", "qwen3_5_text")
FURTHER_VISION = ("qwen3_5", "qwen3_vl_moe")
MIXTURES = ("mixtral", "gpt_oss", "glm4_moe")  # whose experts have other names in files and in vLLM
TEXT = (*TEXT_FAMILIES, *FURTHER_TEXT, *MIXTURES)
MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
END, PAD = "<|im_end|>", "<|endoftext|>"
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 128 * 128}
VIDEO_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}  # of a frame; Qwen3-VL counts all frames together
VOCAB = 272  # more than the tokenizer has, as the vocabularies of published models are
HIDDEN = 64
LINEAR_ATTENTION = {
    "num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 32, "value_head_dim": 32, "conv_kernel_dim": 4,
}  # fmt: skip

CHAT_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for item in message.content %}
{%- if item.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif item.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{ item.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def make_tokenizer() -> Any:
    """A tokenizer of one token a byte, and the special tokens of the Qwen-VL families behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    special = (PAD, "<|im_start|>", END, *MEDIA_TOKENS)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor(family: str) -> Any:
    """The processor of a vision-language family, the tokenizer of another."""
    if family in TEXT:
        return make_tokenizer()
    processor_class, video_class, patch = {
        "qwen2_vl": (hf.Qwen2VLProcessor, hf.Qwen2VLVideoProcessor, 14),
        "qwen2_5_vl": (hf.Qwen2_5_VLProcessor, hf.Qwen2VLVideoProcessor, 14),
        "qwen3_vl": (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor, 16),
        "qwen3_vl_moe": (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor, 16),
        "qwen3_5": (hf.Qwen3VLProcessor, hf.Qwen3VLVideoProcessor, 16),
    }[family]
    frames = 8 if processor_class is hf.Qwen3VLProcessor else 1
    video_pixels = {edge: frames * pixels for edge, pixels in VIDEO_PIXELS.items()}
    images = hf.Qwen2VLImageProcessor(patch_size=patch, size=PIXELS)
    videos = video_class(patch_size=patch, size=video_pixels, cap_pixels_per_frame=False)
    return processor_class(images, make_tokenizer(), videos, chat_template=CHAT_TEMPLATE)


def make_config(family: str) -> Any:
    """Two layers, 64 wide, in text and vision alike."""
    tokenizer = make_tokenizer()
    end, pad, *media = tokenizer.convert_tokens_to_ids([END, PAD, *MEDIA_TOKENS])
    text = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad,
    }  # fmt: skip
    linear = {f"linear_{name}": value for name, value in LINEAR_ATTENTION.items()}
    hybrid = {"layer_types": ["linear_attention", "full_attention"], **linear}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    further = {
        "qwen3_moe": experts,
        "mixtral": local,
        "gpt_oss": {**local, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128},
        "glm4_moe": {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
        "qwen3_5_text": hybrid,
    }
    if family in TEXT:
        return hf.AutoConfig.for_model(family, **text, **further.get(family, {}), tie_word_embeddings=False)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    if family.startswith("qwen3_vl"):  # transformers does it unasked, vLLM where the configuration says so
        rope |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if family == "qwen3_vl_moe":
        # No square, to see which way round it is. vLLM asks for what published models' files say of their routers.
        text |= {**experts, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if family == "qwen3_5":
        rope |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text |= hybrid
    size = {"hidden_size": HIDDEN, "intermediate_size": 96, "out_hidden_size": HIDDEN}
    deep = {**size, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    vision = {
        "qwen2_vl": {"embed_dim": HIDDEN, "hidden_size": HIDDEN, "mlp_ratio": 2},
        "qwen2_5_vl": {**size, "fullatt_block_indexes": [1], "window_size": 56, "tokens_per_second": 2},
        "qwen3_vl": deep,
        "qwen3_vl_moe": deep,
        "qwen3_5": {**size, "num_position_embeddings": 64},
    }[family]
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return hf.AutoConfig.for_model(
        family,
        text_config={**text, "rope_parameters": rope},
        vision_config={
            **vision,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 16 if family.startswith("qwen3") else 14,
        },
        tie_word_embeddings=False,
        **dict(zip(names, media, strict=True)),
    )


def make_model(family: str, scale: float = 5.0, config: Any = None) -> Any:
    """A model with random weights, `scale` times as large as at the start of a training: it has opinions."""
    config = make_config(family) if config is None else config
    is_text = family in TEXT
    kind = hf.AutoModelForCausalLM if is_text else hf.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def save_model(family: str, folder: Path, model: Any = None) -> str:
    """Write a whole Hugging Face folder, of `model` or of a new one; return its path."""
    (make_model(family) if model is None else model).save_pretrained(folder)
    make_processor(family).save_pretrained(folder)
    return str(folder)
