"""Which models the embedded engine samples from exactly, and which it refuses by name instead of sampling wrongly."""

from typing import Any

import pytest
import torch
import transformers
from embedded_cases import HandPrompt, assert_exact, engine_for, sample, text_prompt
from rollout_models import TEXT, sharpen

from r1_rollout.embedded.attention import decode_attention
from r1_rollout.embedded.segments import Segment
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 12}
TABLE = {"vocab_size": 64, "eos_token_id": None, "bos_token_id": None}
GPT = {**TABLE, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
LATENT = {**TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
PARAMS = SamplingParams(max_tokens=9, n=3, ignore_eos=True)


def model(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return sharpen(transformers.AutoModelForCausalLM.from_config(config))


def prompts(*lengths: int) -> list[Any]:
    return [text_prompt(f"p{length}", length) for length in lengths]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", TEXT),
        ("Llama", {**TEXT, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("Qwen3", {**TEXT, "head_dim": 12}),
        ("Qwen3Moe", {**TEXT, **MIXTURE}),
        ("Mistral", {**TEXT, "sliding_window": None}),
        ("Phi3", {**TEXT, "pad_token_id": 0}),
        ("Gemma", {**TEXT, "head_dim": 12}),
        ("Gemma2", {**TEXT, "head_dim": 12, "attn_logit_softcapping": 0.3}),
        ("GptOss", {**TEXT, "head_dim": 12, "num_local_experts": 2, "num_experts_per_tok": 1}),  # sinks
        ("DeepseekV2", LATENT),
        ("DeepseekV3", LATENT),
        ("GPT2", GPT),  # positions of its own table, not rotary ones
        ("OPT", {**TABLE, "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    ],
)
def test_log_probs_are_those_of_a_plain_forward(name: str, settings: dict[str, Any]) -> None:
    one, plain = model(name, **settings), model(name, **settings)
    plain.set_attn_implementation("eager")  # which computes what a layer asks for
    asked = prompts(3, 1, 17, 6)
    assert_exact(plain, asked, sample(one, asked, PARAMS, banned_token_ids=()), 1.0)


LAYERS = ["sliding_attention", "full_attention"]
WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {},  # its configuration has a window and no list of layers
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"head_dim": 12, "attn_logit_softcapping": 0.3},
    "Gemma3Text": {"head_dim": 12},
    "GptOss": {"head_dim": 12, "num_local_experts": 2, "num_experts_per_tok": 1},  # sinks
    "Cohere2": {},
    # The last two layers attend with the keys and values of the first two.
    "Gemma3nText": {"head_dim": 12, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": LAYERS * 2,
                    "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4,
                    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "Gemma4Text": {"head_dim": 12, "global_head_dim": 20, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                   "layer_types": LAYERS * 2, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    # Chunks in place of a window, and queries that grow with their places, 5 tokens at a time.
    "Llama4Text": {"head_dim": 12, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
                   "intermediate_size_mlp": 64, "moe_layers": [], "floor_scale": 5, "attn_scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "window"),
    [
        (name, window)
        for place, name in enumerate(WINDOWED)
        for window in ((1, 6, 20, 300) if name == "Gemma2" else ((1, 20), (6, 300))[place % 2])
    ],
)
def test_sliding_layers_are_exact_beyond_their_window(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over segments of 4, 4, 8, … columns, of which layers see none, a part or all, and rows of several ages."""
    monkeypatch.setattr("r1_rollout.embedded.segments.FIRST", 4)
    size = "attention_chunk_size" if name.startswith("Llama4") else "sliding_window"
    settings = {**TEXT, **WINDOWED[name], size: window}
    one, plain = model(name, **settings), model(name, **settings)
    plain.set_attn_implementation("eager")
    asked = prompts(3, 1, 33, 6)
    params = SamplingParams(max_tokens=26, n=3)
    groups = sample(one, asked, params, banned_token_ids=(), end_token_ids={7, 8, 9}, max_sequences=6)
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 2, "all ended together"
    assert_exact(plain, asked, groups, 1.0)


def test_an_answer_goes_on_beyond_a_window_with_other_weights() -> None:
    """As a partial rollout does: its tokens so far are sampled from the weights of before, the others from the new."""
    settings = {**TEXT, **WINDOWED["Gemma2"], "sliding_window": 8}
    before, after = model("Gemma2", **settings), model("Gemma2", **settings)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(1.3)
    engine, asked = engine_for(before, banned_token_ids=()), prompts(5, 14)
    for version, plain in enumerate((before, after)):
        plain.set_attn_implementation("eager")
        with engine.active(LocalWeights(plain.state_dict().items(), version)):
            groups = dict(engine.generate(asked, SamplingParams(max_tokens=9, ignore_eos=True)))
        assert_exact(plain, asked, [groups[index] for index in range(len(asked))], 1.0)
        tokens = [[*one.token_ids, *groups[index][0].token_ids.tolist()] for index, one in enumerate(asked)]
        asked = [HandPrompt(one.id, ids, torch.arange(len(ids))[None]) for one, ids in zip(asked, tokens, strict=True)]


def test_latent_keys_that_are_expanded_otherwise_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model("DeepseekV3", **LATENT)
    attention: Any = type(one.model.layers[0].self_attn)
    expand = attention.expand_kv

    def turn(self: Any, latent: Any, rotated: Any) -> Any:
        keys, values = expand(self, latent, rotated)
        return keys, values if latent.shape[2] > 1 else -values

    monkeypatch.setattr(attention, "expand_kv", turn)
    with pytest.raises(ValueError, match="would sample wrongly from DeepseekV3ForCausalLM"):
        engine_for(one, banned_token_ids=())


@pytest.mark.parametrize("window", [100, 4096])
def test_a_window_that_slides_wrongly_is_found_at_the_start(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    show = Segment.show

    def show_less(self: Segment, window: Any, begins: Any, ends: Any) -> None:
        show(self, window, None if begins is None else begins + 1, ends)

    monkeypatch.setattr(Segment, "show", show_less)
    with pytest.raises(ValueError, match="would sample wrongly from MistralForCausalLM"):
        engine_for(model("Mistral", **TEXT, sliding_window=window), banned_token_ids=())


def test_the_check_of_wide_windows_leaves_them_as_they_were() -> None:
    one = model("GptOss", **TEXT, **WINDOWED["GptOss"], sliding_window=4096)
    engine = engine_for(one, banned_token_ids=())
    sizes = [layer.self_attn.sliding_window for layer in engine._model.model.layers]
    assert (engine._model.config.sliding_window, sizes) == (4096, [4096, None])


def test_a_layer_whose_window_is_not_that_of_its_configuration_is_refused() -> None:
    one = model("Mistral", **TEXT, sliding_window=20)
    one.config.layer_types = ["full_attention", "full_attention"]
    with pytest.raises(ValueError, match="MistralAttention attends within a window, its configuration has no"):
        engine_for(one, banned_token_ids=())


@pytest.mark.parametrize(
    ("name", "settings", "obstacle"),
    [
        ("GPTJ", {**GPT, "rotary_dim": 4}, "attention or a state of"),
        (
            "Falcon",
            {**TABLE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            "attention or a state of",
        ),
        ("Bart", {**TABLE, "d_model": 48, "decoder_layers": 1, "decoder_attention_heads": 4}, "positions that cannot"),
        ("Rwkv", {**TABLE, "hidden_size": 48, "num_hidden_layers": 2}, "attention or a state of"),
    ],
)
def test_models_that_it_would_sample_from_wrongly_are_refused(
    name: str, settings: dict[str, Any], obstacle: str
) -> None:
    with pytest.raises(ValueError, match=f"cannot sample from {name}ForCausalLM .it has .*{obstacle}.*, vLLM may"):
        engine_for(model(name, **settings), banned_token_ids=())


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
LONG = {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_parameters": FACTORS}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("DiffLlama", TEXT, "DiffLlamaAttention does not attend to the keys as its cache gave them"),
        # A neighbour far along changes the rotary embedding of the whole batch.
        ("Llama", {**TEXT, "max_position_embeddings": 64, "rope_parameters": DYNAMIC}, "wrongly"),
        ("Phi3", {**TEXT, "pad_token_id": 0, **LONG}, "wrongly"),
        ("RecurrentGemma", {**TABLE, "hidden_size": 48, "num_hidden_layers": 3, "lru_width": 48}, "cannot sample"),
        ("Doge", TEXT, "cannot sample from DogeForCausalLM"),
    ],
)
def test_a_model_whose_own_forward_says_otherwise_is_refused_at_the_start(
    name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        engine_for(model(name, **settings), banned_token_ids=())


@pytest.mark.parametrize("name", ["alibi", "head_mask", "sinks", "indices"])
def test_what_attention_does_not_compute_is_refused(name: str) -> None:
    one = torch.ones(1, 2, 1, 4)
    with pytest.raises(ValueError, match=f"Linear changes its attention scores by {name}"):
        decode_attention(torch.nn.Linear(1, 1), one, one, one, None, **{name: torch.ones(2)})


def test_what_is_no_transformers_model_is_refused() -> None:
    from r1_rollout.embedded import EmbeddedEngine

    with pytest.raises(ValueError, match=r"takes a transformers\.PreTrainedModel, got a Linear"):
        EmbeddedEngine(torch.nn.Linear(2, 2), end_token_ids={2})


@pytest.mark.parametrize("token", [64, -1])
def test_a_token_that_the_model_does_not_know_is_named(text_model: Any, token: int) -> None:
    asked = prompts(3)
    asked[0].token_ids[1] = token
    with pytest.raises(ValueError, match=f"prompt p3: token {token} is outside the vocabulary of 64"):
        sample(text_model, asked, PARAMS)
