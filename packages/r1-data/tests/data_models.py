"""Configurations of tiny models, one a family, whose tokens are those of a processor."""

from typing import Any

from transformers import AutoConfig


def tiny_config(family: str, processor: Any) -> Any:
    """Return the Hugging Face configuration of a random model that fits `processor`."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    text = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 300, "head_dim": 16}
    size = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision = {
        "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1},
        "qwen2_5_vl": {**size, "depth": 1, "out_hidden_size": 32},
        "qwen3_vl": {**size, "depth": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    }[family]
    return AutoConfig.for_model(
        family,
        text_config=text | heads | {"rope_parameters": rope},
        vision_config=vision,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=processor.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=processor.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
