"""Tiny random models of every architecture of the installed transformers, made without a published configuration."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from r1_cli.models.load import without_dropout
from r1_rollout.loading import model_family

NAMES = sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
# Some with a vision tower are listed among the causal models alone.
TOWERS = {name for name in NAMES if "vision_config" in CONFIG_MAPPING[name].sub_configs}
VISION = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *TOWERS}
VOCAB = 272
SPECIAL = {"bos_token_id": 256, "pad_token_id": 257, "eos_token_id": 258}


def by_name(names: Mapping[Any, str]) -> dict[str, Any]:
    return {name: value for value, words in names.items() for name in words.split()}


# What configurations call their sizes, of text and of vision.
TEXT_SIZES = by_name(
    {
        VOCAB: "vocab_size vocab_size_per_layer_input",
        64: """
        hidden_size n_embd d_model conv_dim block_dim index_topk word_embed_proj_dim
        lru_width attention_window_size dim_model embed_dim embedding_size
        encoder_hash_byte_group_vocab hidden_size_global
    """,
        512: "n_positions",
        96: """
        intermediate_size ffn_dim block_ff_dim intermediate_size_mlp n_inner dim_ff ffn_hidden_size d_ff
        decoder_ffn_dim encoder_ffn_dim
    """,
        2: """
        num_attention_heads n_head n_heads attention_heads decoder_attention_heads num_experts_per_tok
        linear_num_key_heads linear_num_value_heads linear_num_heads mamba_expand num_heads index_n_heads
        encoder_attention_heads o_groups num_encoder_attention_heads num_decoder_attention_heads
    """,
        1: """
        num_key_value_heads n_shared_experts n_group topk_group first_k_dense_replace moe_layer_start_index
        mamba_n_groups n_groups num_global_key_value_heads
    """,
        32: """
        head_dim d_kv moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size q_lora_rank
        kv_lora_rank v_head_dim linear_key_head_dim linear_head_dim qk_head_dim linear_value_head_dim
        mamba_head_dim mamba_d_head shared_intermediate_size moe_shared_expert_intermediate_size global_head_dim
        index_head_dim query_pre_attn_scalar kv_channels o_lora_rank
    """,
        2048: "max_position_embeddings",
        4: "num_experts num_local_experts n_routed_experts mamba_num_heads mamba_n_heads num_memory_blocks",
        16: "qk_nope_head_dim qk_rope_head_dim mamba_d_state ssm_state_size hidden_size_per_layer_input state_size",
        24: "sliding_window attention_chunk_size floor_scale",
        128: "mamba_d_ssm",
        8: "laurel_rank rotary_dim",
    }
)
VISION_SIZES = by_name(
    {
        64: """
        hidden_size out_hidden_size embed_dim num_position_embeddings vision_output_dim projector_input_dim
        projector_output_dim model_dim
    """,
        96: "intermediate_size",
        2: "depth num_hidden_layers num_heads num_attention_heads num_key_value_heads mlp_ratio",
        3: "num_channels",
        32: "head_dim global_head_dim",
        1: "num_global_layers",
        False: "qk_normalization",
    }
) | {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_encoder_layers",
    "num_decoder_layers", "num_layers_per_stack",
)  # fmt: skip


# Where the rule above does not give a valid configuration: given to the class, or set on the part of that type.
SHARES = ["sliding_attention", "full_attention"] * 2  # the last two layers use the keys and values of the first two
GEMMA4 = dict(
    layer_types=SHARES, num_hidden_layers=4, hidden_size=64, intermediate_size=96,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, global_head_dim=32, vocab_size=VOCAB, sliding_window=24,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=2, **SPECIAL,
)  # fmt: skip
SMALL = dict(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=VOCAB, **SPECIAL,
)  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
GIVEN: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "bamba": {**SMALL, **MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**SMALL, **MAMBA, "head_dim": 32, "mamba_d_ssm": 128},
    "mamba2": dict(
        num_heads=4, head_dim=32, hidden_size=64, expand=2, state_size=16, n_groups=1, num_hidden_layers=2,
        vocab_size=VOCAB, chunk_size=16, **SPECIAL,
    ),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention", "mlp", "moe"], n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, hidden_size=64,
        intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=VOCAB,
        mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=1, expand=2, chunk_size=16, **SPECIAL,
    ),
    "jamba": {**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2},
    "recurrent_gemma": {**SMALL, "num_hidden_layers": 3, "lru_width": 64, "head_dim": 32},
    "falcon": {key: value for key, value in SMALL.items() if key not in ("intermediate_size", "num_key_value_heads")},
    "dbrx": {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": 512, "vocab_size": VOCAB,
             "attn_config": {"rope_theta": 1e4, "kv_n_heads": 1, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    "zamba2": {**SMALL, "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
               "num_key_value_heads": 2, "mamba_d_state": 16, "mamba_headdim": 32, "n_mamba_heads": 4,
               "adapter_rank": 8, "chunk_size": 16, "attention_hidden_size": 128, "attention_head_dim": 64},
    "xlstm": dict(hidden_size=64, num_hidden_layers=2, num_heads=2, vocab_size=VOCAB, chunk_size=16, **SPECIAL),
    "zamba": {**SMALL, "num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2,
              "mamba_d_state": 16, "mamba_dt_rank": 4, "attention_hidden_size": 128, "attention_head_dim": 64},
}  # fmt: skip
# Parts that a configuration does not make by itself, or makes of another type.
PARTS: dict[str, dict[str, Any]] = {
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2", "is_decoder": True}},
}
BOTH_ROPES = {
    kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 5, 6]}
    for kind in ("full_attention", "sliding_attention")
}
BOTH = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
CHANGED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SHARES,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "minimax": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "diffllama": {"num_key_value_heads": 2},
    "qwen2_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "qwen2_5_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "glm4v_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "paddleocr_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "glm_ocr_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "qwen2_5_omni_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4]},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "mistral4": {"head_dim": 32},
    "codegen": {"n_head": 4},
    "chameleon": {"vocabulary_map": {"<image>": 260, "IMGIMGAZ": 261, "IMGIMGBZ": 262}},
    "emu3": {"vocabulary_map": {"<image>": 260, "<|extra_200|>": 261, "<|visual token 000000|>": 262}},
    "step3p5": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": BOTH},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4, 4]}
    },
    "cohere_compass_text": {"rope_parameters": BOTH_ROPES},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, "num_experts_per_tok": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "chameleon_vqgan": {"base_channels": 32, "num_embeddings": 16, "embed_dim": 64, "latent_channels": 64},
    "emu3_vqgan": {"base_channels": 32, "codebook_size": 16, "num_res_blocks": 1, "hidden_size": 32},
    "granite4_vision": {"downsample_rate": "1/4", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0]},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 64,
                       "indexer_compress_ratio": 4},
    # The wide model reads groups of two states of the narrow ones.
    "blt_local_encoder": {"hidden_size_global": 128, "cross_attn_k": 2},
    "blt_local_decoder": {"hidden_size_global": 128, "cross_attn_k": 2},
    "blt_global_transformer": {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4},
}  # fmt: skip
ALWAYS = ("head_dim", "num_key_value_heads")  # set where a configuration has None


def shrink(config: Any, *, vision: bool = False) -> Any:
    """Make a configuration tiny in place: by what its values are called, and the same for its parts."""
    if config.model_type in GIVEN:
        return config
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and not isinstance(part, dict):
            shrink(part, vision=any(word in key for word in ("vision", "vq", "audio", "image", "speech")))
    for key, value in (VISION_SIZES if vision else TEXT_SIZES).items():
        held = getattr(config, key, None)
        number = isinstance(held, int | float) and not isinstance(held, bool)
        if number or (isinstance(value, list) and held) or (key in ALWAYS and hasattr(config, key) and held is None):
            with suppress(AttributeError, NotImplementedError):  # some are derived from others
                setattr(config, key, float(value) if isinstance(held, float) else value)
    if not vision:
        shrink_layers(config)
        name_tokens(config)
        if getattr(config, "kv_lora_rank", None):  # latent attention: as many key heads, rotated by part of a head
            config.num_key_value_heads, config.head_dim = 2, 16
    for key, value in CHANGED.get(config.model_type, {}).items():
        setattr(config, key, copy.deepcopy(value))
    return config


def shrink_layers(config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    some = list(dict.fromkeys(kinds)) if isinstance(kinds, list) else []
    count = max(2, len(some))
    for key in LAYERS:
        if isinstance(getattr(config, key, None), int):
            with suppress(NotImplementedError):
                setattr(config, key, count)
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        held = getattr(config, key, None)
        if isinstance(held, list):
            with suppress(AttributeError):
                setattr(config, key, (list(dict.fromkeys(held)) * count)[:count])
    if getattr(config, "no_rope_layers", None):
        config.no_rope_layers = ([1, 0] * count)[:count]
    if getattr(config, "moe_layers", None) is not None:
        config.moe_layers = [1]
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        half = int(32 * (rope.get("partial_rotary_factor") or 1.0)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def name_tokens(config: Any) -> None:
    for number, key in enumerate(sorted(vars(config))):
        held = getattr(config, key)
        if key in SPECIAL:
            setattr(config, key, SPECIAL[key])
        elif key.endswith(("_token_id", "_token_index")) and isinstance(held, int) and held >= VOCAB:
            setattr(config, key, 259 + number % 12)


def make_config(name: str) -> Any:
    if name in GIVEN:
        return CONFIG_MAPPING[name](**GIVEN[name])
    config = CONFIG_MAPPING[name](**copy.deepcopy(PARTS.get(name, {})))
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None and not isinstance(part, dict) and part.model_type in GIVEN:
            setattr(config, key, CONFIG_MAPPING[part.model_type](**GIVEN[part.model_type]))
    return shrink(config)


def make_model(name: str, config: Any = None) -> Any:
    """A tiny model of an architecture with weights large enough that attention matters."""
    config = without_dropout(make_config(name)) if config is None else config
    torch.manual_seed(0)
    model = model_family(config).from_config(config).eval().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            elif "sink" in key:
                parameter.normal_()
    return model
