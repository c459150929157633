"""The engine's own decoding step: which models have one, that it is exact, and when their own forward takes over."""

from typing import Any

import pytest
import torch
import transformers
from embedded_cases import HandPrompt, assert_exact, engine_for, mixed_prompts, text_prompt
from rollout_models import TEXT, sharpen

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.embedded.stack import Stack
from r1_rollout.types import Completion, SamplingParams
from r1_rollout.weights import LocalWeights

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 12}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
TALL = {"depth": 2, "hidden_size": 32, "num_heads": 2}
PARAMS = SamplingParams(max_tokens=9, n=3, ignore_eos=True)


def model(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**TEXT, **settings})
    return sharpen(transformers.AutoModelForCausalLM.from_config(config))


def prompts() -> list[HandPrompt]:
    return [text_prompt(f"p{length}", length) for length in (3, 1, 17, 6)]


def sampled(engine: EmbeddedEngine, one: Any, asked: list[HandPrompt]) -> list[list[Completion]]:
    with engine.active(LocalWeights(one.state_dict().items(), 0)):
        groups = dict(engine.generate(asked, PARAMS))
    return [groups[index] for index in range(len(asked))]


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that a stack takes from here on."""
    rows: list[int] = []
    step = Stack.step

    def counted(self: Stack, tokens: Any, *args: Any) -> Any:
        rows.append(len(tokens))
        return step(self, tokens, *args)

    monkeypatch.setattr(Stack, "step", counted)
    return rows


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {"rope_parameters": YARN}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 12}),
        ("Qwen3Moe", MIXTURE),
    ],
)
def test_known_families_take_every_step_through_a_stack_and_stay_exact(
    name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, asked = model(name, **settings), prompts()
    engine = engine_for(one, banned_token_ids=())
    steps = count_steps(monkeypatch)
    groups = sampled(engine, one, asked)
    assert steps == [12] * 8  # the prompts' own forward gives each answer's first token
    assert_exact(one, asked, groups, 1.0)


def test_rotary_axes_of_pictures_go_through_a_stack(vision_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_for(vision_model), mixed_prompts(vision_model)
    steps = count_steps(monkeypatch)
    groups = sampled(engine, vision_model, asked)
    assert steps == [15] * 8
    assert_exact(vision_model, asked, groups, 1.0)


@pytest.mark.parametrize(
    ("name", "vision"),
    [
        ("Qwen2VL", {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 48}),
        ("Qwen3VL", {**TALL, "intermediate_size": 48, "out_hidden_size": 48, "deepstack_visual_indexes": [0]}),
    ],
)
def test_other_vision_language_families_have_a_stack(name: str, vision: dict[str, Any]) -> None:
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, "rope_parameters": MROPE, "head_dim": 12}, vision_config=vision
    )
    one = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    assert EmbeddedEngine(one, end_token_ids={7}, version=0)._stack is not None


@pytest.mark.parametrize(
    ("name", "settings"), [("Gemma", {"head_dim": 12}), ("Phi3", {"pad_token_id": 0}), ("Olmo2", {})]
)
def test_other_families_keep_their_own_forward(name: str, settings: dict[str, Any]) -> None:
    assert engine_for(model(name, **settings), banned_token_ids=())._stack is None


@pytest.mark.parametrize("change", ["computes something else", "fails"])
def test_a_layer_that_only_looks_known_keeps_its_own_forward(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = model("Llama")
    if change == "fails":
        monkeypatch.setattr(Stack, "step", lambda *args: 1 / 0)
    else:  # as Granite does, whose layers are built alike
        forward = transformers.models.llama.modeling_llama.LlamaMLP.forward
        monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", lambda *a: 3 * forward(*a))
    engine = EmbeddedEngine(one, end_token_ids={7}, version=0)
    assert engine._stack is None
    groups = dict(engine.generate(prompts()[:1], PARAMS))
    assert_exact(one, prompts()[:1], [groups[0]], 1.0)


@pytest.mark.parametrize("path", ["", "model", "model.layers.1.self_attn", "model.layers.0.mlp", "model.norm"])
def test_a_hook_on_what_a_stack_goes_around_is_called_in_every_step_and_told_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, calls = EmbeddedEngine(model("Qwen2"), end_token_ids={7}, version=0), []
    assert engine._stack is not None
    engine._model.get_submodule(path).register_forward_hook(lambda *args: calls.append(1))
    for _ in range(2):
        list(engine.generate(prompts()[:1], PARAMS))
    assert len(calls) == 2 * PARAMS.max_tokens
    (told,) = caplog.messages
    assert "has a forward hook (test_a_hook" in told
