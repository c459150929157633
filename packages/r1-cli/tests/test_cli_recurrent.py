"""Recurrent layers compute a packed row as their model computes each sequence alone, shared prompts too."""

import copy
from itertools import chain
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from r1_cli.models.attention import attend_packed
from r1_cli.models.load import enable_gradient_checkpointing
from r1_cli.models.recurrent import PackedMixer, plan_calls
from r1_cli.plan.model_sizes import read_text
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.learner.pack import Pack
from r1_core.objective import Objective
from r1_core.types import LossInputs, LossOutput, Sample
from r1_rollout.embedded.prefill import PrefillPart, prefill
from r1_rollout.embedded.states import count_states
from r1_rollout.probes import ProbePrompt

VOCAB = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "num_hidden_layers": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": TEXT | MIXED | DELTA,
    "lfm2": TEXT | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "expand": 2,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "minimax": TEXT | MIXED | {"block_size": 16, "num_local_experts": 2},
    "qwen3_5_moe_text": TEXT | MIXED | DELTA | EXPERTS,
    "qwen3_next": TEXT | MIXED | DELTA | EXPERTS,
    "falcon_h1": TEXT | MAMBA | {"mamba_d_ssm": 64},
    "bamba": TEXT | MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": TEXT | MIXED | MAMBA | {"shared_intermediate_size": 24, "num_local_experts": 2},
    "nemotron_h": {
        **TEXT,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 16,
    },
    "olmo_hybrid": TEXT | MIXED | DELTA,
}  # fmt: skip
SHARES = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
FAST = ("qwen3_5_text", "lfm2", "mamba2", "minimax")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES]
GROUPS = ((37, (1, 9, 33)), (21, (5,)), (80, (70, 2, 13)), (2, (3, 4)), (37, (6, 6)))


def build(name: str) -> Any:
    sizes = {**FAMILIES, "gemma3n_text": TEXT | SHARES}[name]
    if name == "nemotron_h":  # counts its layers by itself
        sizes = {key: value for key, value in sizes.items() if key != "num_hidden_layers"}
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(name, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def make_samples() -> list[Sample]:
    draw, samples = torch.Generator().manual_seed(3), list[Sample]()
    for group, (start, answers) in enumerate(GROUPS):
        prompt = torch.randint(0, VOCAB, (start,), generator=draw)
        for length in answers:
            ids = torch.cat([prompt, torch.randint(0, VOCAB, (length,), generator=draw)])
            samples.append(
                Sample(
                    ids, torch.arange(len(ids)) >= start, torch.arange(len(ids))[None], group_id=group, reward=0.0,
                    prompt_length=start, old_logprobs=torch.zeros(len(ids)), advantages=torch.ones(len(ids)),
                )
            )  # fmt: skip
    return samples


def alone(model: Any, sample: Sample) -> Tensor:
    logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0, :-1]
    chosen: Tensor = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
    return chosen[sample.loss_mask[1:]]


class SumOfLogprobs(Objective):
    token_wise = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(torch.where(inputs.loss_mask, inputs.logprobs, 0.0).sum())


def make_learner(model: Any, *, share: bool) -> Learner:
    attend_packed(model)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    return Learner(
        model, optimizer, lambda step: 1.0, batching=Batching(True, MicroLimit(99), MicroLimit(99), share_prompts=share)
    )


@pytest.mark.parametrize("name", CASES)
def test_packed_and_shared_rows_have_the_values_and_gradients_of_each_sequence_alone(name: str) -> None:
    plain, samples = build(name), make_samples()
    twins = [copy.deepcopy(plain) for _ in range(2)]
    plain.set_attn_implementation("eager")
    expected = [alone(plain, sample) for sample in samples]
    torch.cat(expected).sum().backward()
    largest = max(float(p.grad.norm()) for p in plain.parameters() if p.grad is not None)
    for share, model in zip((False, True), twins, strict=True):
        learner = make_learner(model, share=share)
        for found, own in zip(learner.add_logprobs(samples, ["old_logprobs"]), expected, strict=True):
            assert found.old_logprobs is not None
            torch.testing.assert_close(found.old_logprobs[found.loss_mask], own.detach(), rtol=0, atol=1e-5)
        learner.forward_backward(samples, SumOfLogprobs())
        for (place, parameter), right in zip(model.named_parameters(), plain.parameters(), strict=True):
            if right.grad is not None:
                assert float((parameter.grad - right.grad).norm()) <= 1e-5 * largest, place


def test_activations_that_are_computed_again_belong_to_their_own_pack() -> None:
    plain = build("qwen3_5_text")
    model = copy.deepcopy(plain)
    attend_packed(model)
    enable_gradient_checkpointing(model)
    ids, packs = torch.arange(40)[None] % VOCAB, [Pack.of([13, 27], "cpu"), Pack.of([20, 5, 15], "cpu")]

    def logits(pack: Pack) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in pack.lengths])[None]
        found: Tensor = model(input_ids=ids, position_ids=positions, pack=pack, use_cache=False).logits
        return found

    first = logits(packs[0])
    logits(packs[1])
    first.square().sum().backward()
    sum(plain(input_ids=part, use_cache=False).logits.square().sum() for part in ids.split([13, 27], 1)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3)


def test_what_mixes_tokens_by_a_state_is_found_by_its_nature() -> None:
    found = {}
    for name in ("qwen3_5_text", "lfm2", "minimax"):
        model = build(name)
        attend_packed(model)
        attend_packed(model)  # a second time changes nothing
        found[name] = [type(module).__name__ for module in model.modules() if isinstance(module, PackedMixer)]
        assert model.reads_pack
    assert found == {
        "qwen3_5_text": ["Qwen3_5GatedDeltaNet"], "lfm2": ["Lfm2ShortConv"], "minimax": ["MiniMaxLightningAttention"],
    }  # fmt: skip
    own = hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**TEXT, "head_dim": 16}))
    attend_packed(own)
    assert not any(isinstance(module, PackedMixer) for module in own.modules())


def test_segments_of_like_length_share_a_call_and_answers_go_on_from_their_prompt() -> None:
    # Two prompts of 5, one with answers of 3 and 4, the other with one of 1; a sequence of 300 and one of 100.
    pack = Pack.of([5, 3, 4, 5, 1, 300, 100], "cpu", behind=[-1, 0, 0, -1, 3, -1, -1])
    calls = plan_calls(pack, True)
    assert [(runs.count, len(runs.places) // runs.count, runs.keeps) for runs in calls.runs] == [
        (2, 5, True), (1, 300, False), (1, 100, False), (3, 4, False),
    ]  # fmt: skip
    prompts = calls.runs[-1].prompts
    assert prompts is not None
    assert prompts.tolist() == [0, 0, 1]  # the answers of 4, 3 and 1
    places = torch.cat([runs.places[runs.kept] for runs in calls.runs])
    assert places[calls.order].tolist() == list(range(418))
    again = plan_calls(pack, False)
    assert [(runs.count, len(runs.places) // runs.count) for runs in again.runs] == [(1, 300), (1, 100), (5, 9)]
    first = again.runs[-1]
    longest = next(row for row in first.places.view(5, 9).tolist() if 8 in row)  # the answer of 4 with its prompt
    assert longest == [0, 1, 2, 3, 4, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("name", "recurrent"),
    [("qwen3_5_text", 1), ("lfm2", 1), ("granitemoehybrid", 1), ("minimax", 1), ("gemma3n_text", 2)],
)
def test_the_estimate_counts_a_samples_keys_values_and_states(name: str, recurrent: int) -> None:
    model = build(name)
    found = prefill(model, [PrefillPart(ProbePrompt("p", [1] * 7, torch.arange(7)[None]), {})], 0, count_states(model))
    tensors = [
        *chain.from_iterable((*one.conv_states.values(), *one.recurrent_states.values()) for one in found.states)
    ]
    kept = sum(tensor.nbytes for tensor in (*tensors, *chain.from_iterable(found.layers)))
    sizes = read_text(model.config.to_dict())
    assert sizes is not None
    assert sizes.recurrent == recurrent
    assert sizes.cache_bytes(7, 4) == kept
