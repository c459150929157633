"""At its start, a run compares its ways to compute log-probs with the model's own and uses only correct ones."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from r1_cli.build import packing
from r1_cli.build.learner import build_batching
from r1_cli.build.packing import Faults, choose_layout, find_faults
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError, configure_modules, load_model
from r1_cli.plan.check.model import examine_layouts
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.objective import Objective
from r1_core.types import LossInputs, LossOutput, Sample
from r1_data.render import Renderer
from r1_rollout.probes import Probes, text_probes

TEXT = {
    "vocab_size": families.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 257,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "gpt_oss": {**EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "glm_moe_dsa": {
        "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 2, "index_head_dim": 32,
        "index_topk": 128, "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron": {},
    "llama4_text": {
        **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 64, "moe_layers": [1], "no_rope_layers": [1, 0],
        "floor_scale": 20, "layer_types": ["chunked_attention", "full_attention"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 24,
        "vocab_size_per_layer_input": families.VOCAB, "hidden_size_per_layer_input": 16,
    },
    "ministral3": {},
    "llama": {},
    "jetmoe": {**EXPERTS, "kv_channels": 32},
}  # fmt: skip
BLOOM = {
    "vocab_size": families.VOCAB,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPTJ = {"vocab_size": families.VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "rotary_dim": 8}
BOTH = (torch.float32, torch.bfloat16)


def make_plain(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model with random weights, large enough that attention matters."""
    settings = {"bloom": BLOOM, "gptj": GPTJ}.get(family) or {**TEXT, **MORE[family]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings, **more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            if "sinks" in name:
                parameter.normal_()
    return model.to(dtype)


def make_learner(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Learner:
    model = make_plain(family, dtype, **more)
    configure_modules(model, dtype, torch.device("cpu"))
    return learner_of(model)


def learner_of(model: Any) -> Learner:
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda step: 1.0)


def probes_of(variant: int) -> Probes:
    return text_probes(range(250), longest_prompt=200, longest_response=8, variant=variant)


def faults_of(learner: Learner, dtype: torch.dtype) -> Faults:
    return find_faults(learner, probes_of(0), probes_of(1), dtype)


def settle(learner: Learner, *words: str, dtype: torch.dtype = torch.float32) -> list[str]:
    """Settle how a run's learner computes; return the warnings."""
    given = ["data.train_files=owner/rows@train", "worker.reward.reward_function=math", "trainer.n_gpus_per_node=1"]
    given += ["worker.actor.model.model_path=owner/model", *words]
    if dtype == torch.bfloat16:
        given += ["worker.actor.fsdp.torch_dtype=bf16"]
    config = load_config(given)[0]
    learner.batching = build_batching(config, config.worker.actor)
    tokenizer, said = families.make_tokenizer(), list[str]()
    files, renderer = ModelFiles("m", learner.model.config, tokenizer, tokenizer), Renderer(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing.log, "warning", lambda line, *args: said.append(line % args))
        choose_layout(config, Hardware("cpu"), files, renderer, learner)
    return said


def make_samples() -> list[Sample]:
    draw = torch.Generator().manual_seed(3)
    return [
        Sample(
            torch.randint(0, 250, (length,), generator=draw),
            torch.arange(length) >= 2,
            torch.arange(length)[None],
            group_id=0,
            reward=0.0,
            old_logprobs=torch.zeros(length),
            advantages=torch.ones(length),
        )
        for length in (90, 33, 71, 12)
    ]


def plain_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    """By transformers alone."""
    with torch.no_grad():
        logits = model(input_ids=sample.token_ids[None]).logits[0].float()
    return logits[:-1].log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0][sample.loss_mask[1:]]


class SumOfLogprobs(Objective):
    token_wise = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(torch.where(inputs.loss_mask, inputs.logprobs, 0.0).sum())


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("family", ["llama", "ministral3", "gemma2", "gpt_oss", "llama4_text", "gemma3n_text"])
def test_a_healthy_model_is_right_in_all_four_in_any_precision(family: str, dtype: torch.dtype) -> None:
    assert faults_of(make_learner(family, dtype), dtype) == Faults(None, None, None, None)


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_model_whose_scores_r1_does_not_know_attends_by_itself(dtype: torch.dtype) -> None:
    learner, plain = make_learner("glm_moe_dsa", dtype), make_plain("glm_moe_dsa", dtype)
    plain.set_attn_implementation("eager")
    first, second = settle(learner, dtype=dtype)
    assert "changes its attention scores by indices" in first
    assert first.endswith("it uses its own eager attention")
    assert "micro-batches are padded" in second
    samples = make_samples()
    for annotated, sample in zip(learner.add_logprobs(samples, ["old_logprobs"]), samples, strict=True):
        gap = annotated.old_logprobs[sample.loss_mask] - plain_logprobs(plain, sample)
        assert float(gap.abs().mean()) < (2e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "llama4_text", "gemma3n_text"])
def test_bounded_scores_sinks_chunks_and_shared_keys_learn_as_the_models_own_attention(
    family: str, layout: str
) -> None:
    learner, plain = make_learner(family), make_plain(family)
    plain.set_attn_implementation("eager")
    learner.batching = Batching(layout != "padded", MicroLimit(8), MicroLimit(8))
    samples = make_samples()
    if layout == "shared":
        prompt = samples[0].token_ids[:40]
        samples = [
            replace(
                sample,
                token_ids=torch.cat([prompt, sample.token_ids]),
                loss_mask=torch.arange(40 + len(sample.token_ids)) >= 40,
                position_ids=torch.arange(40 + len(sample.token_ids))[None],
                old_logprobs=torch.zeros(40 + len(sample.token_ids)),
                advantages=torch.ones(40 + len(sample.token_ids)),
                prompt_length=40,
            )
            for sample in samples
        ]
    learner.forward_backward(samples, SumOfLogprobs())
    total = torch.zeros(())
    for sample in samples:
        logits = plain(input_ids=sample.token_ids[None]).logits[0].float()[:-1]
        taken = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        total = total + taken[sample.loss_mask[1:]].sum()
    total.backward()
    own, expected = (dict(model.named_parameters()) for model in (learner.model, plain))
    assert family != "gpt_oss" or any("sinks" in name for name in own)
    for name, parameter in expected.items():
        gap = float((own[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3))
        assert gap < 1e-5, name


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_layers_that_drop_the_pack_share_no_prompts_in_any_precision(dtype: torch.dtype) -> None:
    faults = faults_of(make_learner("nemotron", dtype), dtype)
    assert (faults.single, faults.padded) == (None, None)
    assert "mixes up the answers to a shared prompt" in str(faults.shared)


def leak_over_rows(model: Any) -> None:
    """A layer that sees the mean of its batch, as one with statistics of a batch."""
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + 0.05 * output.mean(0, keepdim=True)
    )


def leak_over_time(model: Any) -> None:
    """A layer that sees the mean of its row, later tokens included."""
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + 0.05 * output.mean(1, keepdim=True)
    )


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_rows_that_see_one_another_are_computed_one_by_one(dtype: torch.dtype) -> None:
    learner = make_learner("llama", dtype)
    alone = copy.deepcopy(learner.model)
    leak_over_rows(learner.model)
    leak_over_rows(alone)
    [line] = settle(learner, "worker.actor.padding_free=false", dtype=dtype)
    assert "llama mixes up the rows of a padded batch" in line
    assert line.endswith("a micro-batch holds one sample")
    assert learner.batching.single
    samples = make_samples()
    together, one_by_one = (learner.add_logprobs(given, ["old_logprobs"]) for given in (samples, samples[:1]))
    assert torch.equal(together[0].old_logprobs, one_by_one[0].old_logprobs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (leak_over_time, "with its own eager attention, too, it lets a token see later ones (log-probs"),
        (leak_over_time, "; train a causal language model (docs/models.md lists all)"),
        (lambda model: model.lm_head.weight.data.fill_(torch.nan), "its log-probs are not finite: look at the weights"),
    ],
)
def test_a_model_without_a_correct_way_is_refused_by_name(change: Callable[[Any], Any], words: str) -> None:
    learner = make_learner("llama")
    change(learner.model)
    with pytest.raises(ModelError, match="r1 cannot train llama") as error:
        settle(learner)
    assert words in str(error.value)


def test_a_model_without_a_gradient_is_refused_by_the_probe() -> None:
    """Reformer asks for the mode of training, in which its hashes are drawn anew."""
    learner = learner_of(make_model("reformer"))
    with pytest.raises(
        ModelError,
        match=r"r1 cannot train reformer: its own forward fails .*`model.train\(\)`.*; train a model that comp",
    ):
        settle(learner)


def test_the_gradient_of_a_model_is_left_as_it_was() -> None:
    learner = make_learner("llama")
    faults_of(learner, torch.float32)
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def rope(kind: str, known: int = 128) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16} if kind == "longrope" else {}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": known, **factors}


def test_rotations_that_depend_on_the_longest_sample_are_computed_one_by_one_or_refused() -> None:
    longrope = make_learner("llama", rope_parameters=rope("longrope"))
    [line] = settle(longrope, "data.max_prompt_length=100", "data.max_response_length=100")
    assert "llama rotates all samples of a micro-batch by the longest (longrope, beyond 128 tokens)" in line
    samples = make_samples()
    long = Sample(torch.arange(150) % 250, torch.arange(150) >= 2, torch.arange(150)[None], group_id=1, reward=0.0)
    beside, alone = (longrope.add_logprobs(given, ["old_logprobs"])[0] for given in ([samples[1], long], [samples[1]]))
    assert torch.equal(beside.old_logprobs, alone.old_logprobs)
    assert settle(longrope, "data.max_prompt_length=100", "data.max_response_length=28") == []
    dynamic = make_learner("llama", rope_parameters=rope("dynamic"))
    with pytest.raises(ModelError, match=r"beyond 128 tokens its dynamic rotary embedding depends on"):
        settle(dynamic, "data.max_prompt_length=100", "data.max_response_length=100")


def test_ranks_share_no_rows_of_a_model_that_attends_by_itself() -> None:
    with pytest.raises(ConfigError, match=r"ulysses_size=2: .*glm_moe_dsa cannot be computed"):
        settle(make_learner("glm_moe_dsa"), "worker.actor.ulysses_size=2", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("family", "words"),
    [("gptj", "cannot read a shared prompt"), ("jetmoe", ""), ("bloom", "micro-batches are padded")],
)
def test_models_that_choose_their_attention_or_experts_themselves_load_and_are_right(
    family: str, words: str, tmp_path: Path
) -> None:
    plain = make_plain(family)
    plain.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), config=plain.config, dtype=torch.float32, device=torch.device("cpu"))
    learner = learner_of(model)
    said = settle(learner, "data.max_prompt_length=200", "data.max_response_length=50")
    assert words in " ".join(said)
    assert len(said) == (1 if words else 0)
    plain.set_attn_implementation("eager")
    for annotated, sample in zip(learner.add_logprobs(make_samples(), ["old_logprobs"]), make_samples(), strict=True):
        gap = annotated.old_logprobs[sample.loss_mask] - plain_logprobs(plain, sample)
        assert float(gap.abs().max()) < 1e-5


def test_the_comparisons_change_neither_weights_nor_random_numbers() -> None:
    learner = make_learner("gemma2")
    before, state = copy.deepcopy(learner.model.state_dict()), torch.get_rng_state()
    faults_of(learner, torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.model.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert learner.model.config._attn_implementation == "r1_packed"


def test_a_base_model_without_a_chat_template_is_checked(tmp_path: Path) -> None:
    path = families.save_model("qwen2", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    answers = dict(examine_layouts(path))
    assert answers["shared prompts"] == "right"
    assert answers["chat template"] == "none: a run needs data.override_chat_template"
