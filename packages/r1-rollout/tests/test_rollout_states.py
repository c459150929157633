"""Samples of recurrent models go on from copies of their prompt's state, while others enter and leave."""

from typing import Any

import pytest
import torch
import transformers
from embedded_cases import assert_exact, engine_for, sample, text_prompt
from rollout_models import TEXT, sharpen

from r1_rollout.embedded.prefill import prefill_batches
from r1_rollout.embedded.states import RecurrentState
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

MIXED = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 12}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
RECURRENT = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {**TEXT, **MIXED, **DELTA},
    "Lfm2": {**TEXT, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "MiniMax": {**TEXT, **MIXED, "block_size": 8, "num_local_experts": 2},  # lightning attention
    "FalconH1": {**TEXT, **MAMBA, "head_dim": 12, "mamba_d_ssm": 96},  # attention and state in every layer
    "Bamba": {**TEXT, **MAMBA, "attn_layer_indices": [1]},
    "Mamba": {**RECURRENT, "state_size": 4},  # no attention and no positions
    "Mamba2": {**RECURRENT, "num_heads": 4, "head_dim": 24, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "OlmoHybrid": {**TEXT, **MIXED, **DELTA},  # convolutions of its queries, keys and values apart
}
# Samples end at different times, so rows move; four of them run at once, so prompts wait.
PARAMS = SamplingParams(max_tokens=24, n=2, seed=1, stop_token_ids=tuple(range(0, 60, 7)))
LENGTHS = (9, 9, 1, 17, 2, 4)


def build(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = sharpen(transformers.AutoModelForCausalLM.from_config(config))
    if name == "Mamba":  # which makes rounding errors of large weights grow from token to token
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if place < 4 else pytest.mark.slow) for place, name in enumerate(MODELS)]
)
def test_log_probs_are_those_of_a_plain_forward_while_samples_come_and_go(name: str) -> None:
    plain, prompts = build(name), [text_prompt(f"p{i}", length, seed=100 * i) for i, length in enumerate(LENGTHS)]
    groups = sample(plain, prompts, PARAMS, banned_token_ids=(), max_sequences=4)
    assert len({len(one.token_ids) for group in groups for one in group}) > 3
    plain.set_attn_implementation("eager")
    assert_exact(plain, prompts, groups, 1.0)


def test_a_session_computes_what_came_before_a_turn_again(caplog: pytest.LogCaptureFixture) -> None:
    plain = build("Qwen3_5Text")
    engine = engine_for(plain, banned_token_ids=())
    with engine.active(LocalWeights(plain.state_dict().items(), version=1)):
        engine.open_session(PARAMS)
    assert "computes each turn's history again: Qwen3_5ForCausalLM does not go on from it" in caplog.text


def test_states_are_copied_for_samples_and_close_the_gaps_that_leaving_ones_make() -> None:
    state = RecurrentState()
    whole = state.update_conv_state(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), conv_kernel_size=3)
    assert whole.tolist() == [[[0.0, 1.0, 2.0]], [[0.0, 3.0, 4.0]]]
    state.update_recurrent_state(torch.tensor([[5.0], [6.0]]))
    forked = state.select(torch.tensor([0, 0, 1]), in_place=True)
    forked.recurrent_states[0][0] = 9.0
    assert state.recurrent_states[0].tolist() == [[5.0], [6.0]]
    both = RecurrentState.join([forked, forked])
    both.move([5, 4], [0, 2], 2)
    assert both.recurrent_states[0].flatten().tolist() == [6.0, 5.0, 5.0, 9.0]
    assert both.has_previous_state[0]
    assert not both.record_past  # a single token may be written in place
    assert state.update_conv_state(torch.tensor([[[7.0]], [[8.0]]]))[0].tolist() == [[0.0, 1.0, 2.0, 7.0]]
    assert state.conv_states[0][0].tolist() == [[1.0, 2.0, 7.0]]


def test_prompts_of_recurrent_models_are_computed_with_those_of_their_length() -> None:
    assert prefill_batches([5, 9, 5, 9, 9], equal=True) == [[1, 3, 4], [0, 2]]
