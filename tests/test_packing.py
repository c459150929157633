"""A run detects whether its model can be packed, and the learner is right either way."""

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
from family_prompts import make_learner
from torch import Tensor

from r1_cli.build import packing
from r1_cli.build.learner import build_batching
from r1_cli.build.packing import choose_layout, find_packing_fault, find_sharing_fault
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_core.learner import Learner
from r1_core.objective import Objective
from r1_core.types import LossInputs, LossOutput, Sample
from r1_data.positions import position_ids_of
from r1_data.render import Renderer
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.probes import Probes, text_probes
from r1_rollout.weight_checks import TOLERANCE
from r1_rollout.weights import LocalWeights

PACKS = ["qwen2", "qwen3_5_text"]
HYBRID = ("qwen3_5_text", "qwen3_5")
FURTHER = (*families.FURTHER_TEXT, *families.FURTHER_VISION)
ALL = (*families.TEXT_FAMILIES, *families.VISION_FAMILIES, *FURTHER)
END = frozenset({258})
LENGTHS = (24, 31, 17, 40)


def probes_of(model: Any, variant: int) -> Probes:
    axes = 1 if position_ids_of(model.config) is None else 4
    return text_probes(range(250), axes=axes, longest_prompt=200, longest_response=8, variant=variant)


def fault_of(learner: Learner, precision: torch.dtype = torch.float32) -> str | None:
    probes, fresh = (probes_of(learner.model, variant) for variant in (0, 1))
    return find_packing_fault(learner, probes, fresh, TOLERANCE[precision])


def sharing_fault_of(learner: Learner, precision: torch.dtype = torch.float32) -> str | None:
    probes, fresh = (probes_of(learner.model, variant) for variant in (0, 1))
    return find_sharing_fault(learner, probes, fresh, TOLERANCE[precision])


@pytest.mark.parametrize(
    ("family", "precision"),
    [(family, torch.float32) for family in ALL] + [(family, torch.bfloat16) for family in ("qwen3_moe", *HYBRID)],
)
def test_every_family_packs_and_shares_prompts(family: str, precision: torch.dtype) -> None:
    learner = make_learner(families.make_model(family, scale=1.0).to(precision))
    assert fault_of(learner, precision) is None
    assert sharing_fault_of(learner, precision) is None


def test_recurrent_layers_that_read_no_pack_are_found_out() -> None:
    learner = make_learner(families.make_model("qwen3_5_text"))
    learner.model.reads_pack = False
    assert "takes a packed row for one sequence" in str(fault_of(learner))


def test_a_model_that_reads_no_positions_is_found_out() -> None:
    model = families.make_model("qwen2")
    learner = make_learner(model)
    model.set_attn_implementation("eager")
    forward = model.forward
    model.forward = lambda position_ids=None, **inputs: forward(**inputs)
    assert "takes a packed row for one sequence" in str(fault_of(learner))


def test_a_model_that_fails_on_a_packed_row_is_padded_and_its_words_are_kept() -> None:
    model = families.make_model("qwen2")
    forward = model.forward

    def picky(**inputs: Any) -> Any:
        starts = int((inputs.get("position_ids", torch.ones(1)) == 0).sum())
        if starts > len(inputs["input_ids"]) and "attention_mask" not in inputs:
            raise ValueError("positions must rise")
        return forward(**inputs)

    model.forward = picky
    assert fault_of(make_learner(model)) == "cannot read a packed row (positions must rise)"


def test_the_part_of_a_model_that_fails_on_a_packed_row_is_named() -> None:
    model = families.make_model("qwen2")
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def narrow(hidden_states: torch.Tensor, **inputs: Any) -> Any:
        if inputs.get("attention_mask") is None:
            raise RuntimeError("The size of tensor a (7) must match the size of tensor b (76)")
        return forward(hidden_states, **inputs)

    attention.forward = narrow
    fault = "cannot read a packed row (Qwen2Attention fails there with RuntimeError)"
    assert fault_of(make_learner(model)) == fault


def settle(learner: Learner, *words: str) -> list[str]:
    """Settle how a run's learner packs; return what is said."""
    given = ["data.train_files=owner/rows@train", "worker.reward.reward_function=math", "trainer.n_gpus_per_node=1"]
    config = load_config([*given, "worker.actor.model.model_path=owner/model", *words])[0]
    learner.batching = build_batching(config, config.worker.actor)
    tokenizer, said = families.make_tokenizer(), list[str]()
    files, renderer = ModelFiles("m", learner.model.config, tokenizer, tokenizer), Renderer(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing.log, "warning", lambda line, *args: said.append(line % args))
        choose_layout(config, Hardware("cpu"), files, renderer, learner)
    return said


@pytest.mark.parametrize("family", PACKS)
def test_a_run_packs_and_shares_what_can_be(family: str) -> None:
    learner = make_learner(families.make_model(family))
    assert settle(learner) == []
    assert learner.batching.padding_free
    assert learner.batching.share_prompts
    assert settle(learner, "worker.actor.padding_free=false") == []
    assert not learner.batching.padding_free
    assert not learner.batching.share_prompts


def test_a_line_says_which_model_is_padded() -> None:
    learner = make_learner(families.make_model("qwen3_5_text"))
    learner.model.reads_pack = False
    [line] = settle(learner)
    assert "qwen3_5_text takes a packed row for one sequence" in line
    assert not learner.batching.padding_free


def ask_nothing(model: Any) -> None:
    """As a model of somebody's own code, whose layers are not told what runs stand in a row."""
    model.reads_pack = False


def fail(model: Any) -> None:
    forward = model.forward
    model.forward = lambda pack=None, **inputs: forward(pack=pack, **inputs) if not (pack and pack.shared) else {}["x"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ask_nothing, "qwen2 cannot read a shared prompt (Qwen2ForCausalLM reads no `pack`"),
        (fail, "qwen2 cannot read a shared prompt (Qwen2ForCausalLM fails there with KeyError)"),
    ],
)
def test_a_model_that_cannot_share_prompts_packs_without_and_a_line_says_so(
    change: Callable[[Any], None], words: str
) -> None:
    ready = make_learner(families.make_model("qwen2"))
    change(ready.model)
    learner = Learner(ready.model, ready.optimizer, ready.learning_rate)
    [line] = settle(learner)
    assert line.startswith(words)
    assert line.endswith("a prompt is computed with every answer, as with worker.actor.share_prompts=false")
    assert learner.batching.padding_free
    assert not learner.batching.share_prompts
    assert settle(learner, "worker.actor.share_prompts=false") == []


def test_ranks_do_not_share_rows_that_a_model_takes_for_one_sequence() -> None:
    words = ["data.train_files=owner/rows@train", "worker.reward.reward_function=math", "trainer.n_gpus_per_node=2"]
    words += ["worker.actor.model.model_path=owner/model", "worker.actor.ulysses_size=2"]
    tokenizer, model = families.make_tokenizer(), families.make_model("qwen3_5_text")
    files, renderer = ModelFiles("m", model.config, tokenizer, tokenizer), Renderer(tokenizer)
    learner = make_learner(model)
    model.reads_pack = False
    with pytest.raises(ConfigError, match=r"ulysses_size=2: .*qwen3_5_text takes a packed row for one sequence"):
        choose_layout(load_config(words)[0], Hardware("cpu"), files, renderer, learner)


def samples_of(model: Any) -> list[Sample]:
    draw, axes = torch.Generator().manual_seed(1), 1 if position_ids_of(model.config) is None else 4
    return [
        Sample(
            torch.randint(0, 250, (length,), generator=draw),
            torch.arange(length) >= length // 2,
            torch.arange(length).expand(axes, -1),
            group_id=0,
            reward=0.0,
            old_logprobs=torch.zeros(length),
            advantages=torch.ones(length),
        )
        for length in LENGTHS
    ]


class SumOfLogprobs(Objective):
    token_wise = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(torch.where(inputs.loss_mask, inputs.logprobs, 0.0).sum())


def alone(model: Any, sample: Sample) -> Tensor:
    """Log-probs of the trained tokens by a plain call of the model."""
    logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(-1, sample.token_ids[1:, None]).squeeze(-1)
    return chosen[sample.loss_mask[1:]]


@pytest.mark.parametrize("family", FURTHER)
def test_values_and_gradients_are_those_of_each_sequence_alone(family: str) -> None:
    model, plain = families.make_model(family, scale=2.0), families.make_model(family, scale=2.0)
    learner, samples = make_learner(model), samples_of(model)
    if fault_of(learner) is not None:
        learner.set_layout("padded")
    expected = [alone(plain, sample) for sample in samples]
    for annotated, own in zip(learner.add_logprobs(samples, ["old_logprobs"]), expected, strict=True):
        assert annotated.old_logprobs is not None
        torch.testing.assert_close(annotated.old_logprobs[annotated.loss_mask], own.detach(), rtol=0, atol=2e-5)
    torch.cat(expected).sum().backward()
    learner.forward_backward(samples, SumOfLogprobs())
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        found, right = parameter.grad, wanted[name].grad
        assert (found is None) == (right is None), name
        if found is not None and right is not None:
            assert float((found - right).norm()) <= 1e-4 * max(1.0, float(right.norm())), name


@pytest.mark.parametrize("family", FURTHER)
def test_the_embedded_engine_agrees_with_the_learner(family: str) -> None:
    model = families.make_model(family)
    learner = make_learner(families.make_model(family))
    probes = text_probes(range(250), longest_prompt=16, longest_response=8)
    engine = EmbeddedEngine(model, end_token_ids=END)
    with engine.active(LocalWeights(learner.weights(), 1)):
        found = engine.logprobs_of(probes.prompts, probes.responses)
    for prompt, response, own in zip(probes.prompts, probes.responses, found, strict=True):
        token_ids = torch.tensor([*prompt.token_ids, *response])
        mask = torch.arange(len(token_ids)) >= len(prompt.token_ids)
        sample = Sample(token_ids, mask, torch.arange(len(token_ids))[None], group_id=0, reward=0.0)
        [expected] = learner.compute_logprobs_together([sample], padding_free=True)
        assert own == pytest.approx(expected, abs=1e-5)
