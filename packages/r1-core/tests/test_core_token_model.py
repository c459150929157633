"""The learner's token statistics and gradients are those of all logits at once, which it never holds."""

from dataclasses import replace

import pytest
import torch
from core_heads import CHANGING, Headless, LoRAHead, learner_for
from core_models import TEXT, in_float64, picture_samples, qwen2, qwen25_vl, text_samples
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from r1_core import losses
from r1_core.advantages import GRPO, OptimalTokenBaseline, assign
from r1_core.learner import linear_head
from r1_core.learner.batching import MicroLimit, count
from r1_core.learner.microbatch import collate
from r1_core.learner.token_model import TokenModel
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES
from r1_core.objective import Objective
from r1_core.own import as_loss

WIDE = {"clip_low": 0.2, "clip_high": 0.3}
SETTINGS = {
    "gspo": WIDE,
    "gspo_token": WIDE,
    "luspo": WIDE,
    "clip_cov": {"ratio": 0.3, "cov_low": 0.0},
    "kl_cov": {"ratio": 0.3},
}
SEES_SEQUENCES = {"gspo", "gspo_token", "luspo", "gmpo", "geo_mean", "vespo"}
OBJECTIVES = {
    **{name: Objective(losses.get(name)(**SETTINGS.get(name, {})), "seq") for name in POLICY_LOSSES},
    **{f"mean over {mode}": Objective(aggregation=mode, length=9) for mode in AGGREGATIONS},
    "kl and entropy": Objective(kl_penalty="low_var_kl", kl_coef=0.3, entropy_coef=0.2),
    "full kl and entropy": Objective(kl_penalty="full", kl_coef=0.3, entropy_coef=0.2),
    "gspo and entropy": Objective(losses.get("gspo")(**WIDE), "seq", entropy_coef=0.2),
    "off-policy mask": Objective(off_policy_threshold=0.01),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", 64 * 8 * 4)


def moved(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=generator).to(param.dtype))


def gradients(model, objective, samples, **more):
    """One step off policy, whose gradients are of several micro-batches; the names are the bare model's."""
    learner = learner_for(model, reference=qwen2(1).double(), temperature=0.7, **more)
    samples = assign(learner.add_logprobs(samples), GRPO())
    moved(model)
    metrics = learner.forward_backward(samples, objective)
    grads = {
        name.removeprefix(
            "model.",
        ): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return samples, metrics, grads


def compare(build, objective, monkeypatch, **more):
    samples, metrics, grads = gradients(in_float64(build(), monkeypatch), objective, text_samples(), **more)
    plain = Headless(in_float64(build(), monkeypatch))
    plain_samples, plain_metrics, plain_grads = gradients(plain, objective, text_samples(), **more)
    for one, other in zip(samples, plain_samples, strict=True):
        torch.testing.assert_close(one.old_logprobs, other.old_logprobs, atol=1e-6, rtol=0)
    assert metrics == pytest.approx(plain_metrics, abs=1e-10)
    assert {n.removeprefix("model.") for n in grads} == {n.removeprefix("model.") for n in plain_grads}
    ordered = zip(grads.items(), plain_grads.values(), strict=True)
    for (name, grad), other in ordered:
        torch.testing.assert_close(grad, other, atol=1e-10, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    return grads


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_the_gradient_of_all_logits(name, monkeypatch):
    grads = compare(qwen2, OBJECTIVES[name], monkeypatch)
    assert float(grads["lm_head.weight"].abs().max()) > 1e-3


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("name", ["default", "gspo"])
def test_tied_heads_get_the_gradient_of_both_their_uses(name, padding_free, monkeypatch):
    def tied():
        return qwen2(tied=True)

    grads = compare(tied, OBJECTIVES[name], monkeypatch, padding_free=padding_free)
    assert "lm_head.weight" not in grads


@pytest.mark.parametrize("name", ["default", "gspo", "kl and entropy"])
def test_frozen_heads_pass_the_gradient_on(name, monkeypatch):
    def frozen():
        model = qwen2()
        model.lm_head.requires_grad_(False)
        return model

    grads = compare(frozen, OBJECTIVES[name], monkeypatch)
    assert "lm_head.weight" not in grads
    assert float(grads["layers.0.mlp.up_proj.weight"].abs().max()) > 1e-5


@pytest.mark.parametrize("name", ["default", "gspo", "kl and entropy"])
def test_low_rank_heads_get_the_gradient_of_their_factors(name, monkeypatch):
    def adapted():
        model = qwen2()
        torch.manual_seed(7)
        model.lm_head = LoRAHead(model.lm_head)
        return model

    grads = compare(adapted, OBJECTIVES[name], monkeypatch)
    assert {"lm_head.lora_A.weight", "lm_head.lora_B.weight"} <= grads.keys()
    assert "lm_head.base_layer.weight" not in grads


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("name", CHANGING)
def test_models_that_change_the_logits_behind_the_head_are_noticed(name, padding_free, caplog):
    torch.manual_seed(0)
    model = CHANGING[name]()
    learner = learner_for(model, padding_free=padding_free)
    annotated = learner.add_logprobs(text_samples())
    for sample in annotated:
        with torch.no_grad():
            logits = model(input_ids=sample.token_ids[None], position_ids=sample.position_ids).logits[0]
            head = model.lm_head(model.model(input_ids=sample.token_ids[None]).last_hidden_state[0])
        assert not torch.allclose(logits, head, atol=1e-3)
        expected = logits[:-1].log_softmax(-1).gather(-1, sample.token_ids[1:, None])[:, 0]
        expected = torch.where(sample.loss_mask, torch.nn.functional.pad(expected, (1, 0)), 0.0)
        torch.testing.assert_close(sample.old_logprobs, expected, atol=1e-5, rtol=0)
    learner.forward_backward(assign(annotated, GRPO()), Objective())
    assert [type(model).__name__ in record.message for record in caplog.records] == [True]


class Largest(TorchDispatchMode):
    """The most elements that any tensor has which an operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


def largest(model, objective, samples, padding_free, reference):
    learner = learner_for(model, padding_free=padding_free, limit=MicroLimit(9), reference=reference)
    samples = assign(learner.add_logprobs(samples), GRPO())
    with Largest() as seen:
        learner.add_logprobs(samples, ["ref_logprobs", "full_kl" if objective.full_kl else "old_logprobs"])
        learner.forward_backward(samples, objective)
    return seen.elements


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("head", ["trained", "frozen", "lora"])
@pytest.mark.parametrize("name", ["default", "gspo and entropy", "full kl and entropy"])
def test_no_tensor_ever_holds_the_logits_of_all_trained_tokens(name, head, padding_free, monkeypatch):
    vocabulary, objective = 2048, OBJECTIVES[name]
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", 16 * vocabulary * 4)
    samples = text_samples(((3, 40), (5, 40), (2, 40)))
    trained = sum(sample.response_length for sample in samples)
    model, other, reference = (Qwen2ForCausalLM(Qwen2Config(**{**TEXT, "vocab_size": vocabulary})) for _ in range(3))
    if head == "frozen":
        model.lm_head.requires_grad_(False)
    elif head == "lora":
        model.lm_head = LoRAHead(model.lm_head)
    # Two chunks of 16 tokens in one buffer are the largest.
    assert trained * vocabulary / largest(model, objective, samples, padding_free, reference) >= 2.5
    assert largest(Headless(other), objective, samples, padding_free, Headless(reference)) >= trained * vocabulary


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_token_wise_losses_and_no_others_say_so(name):
    """Moving one token's log-prob and entropy changes no other's gradient exactly where the loss says `token_wise`."""
    objective = replace(OBJECTIVES[name], kl_penalty="k3", kl_coef=0.1, entropy_coef=0.1)
    samples = [
        replace(sample, old_logprobs=draw, ref_logprobs=draw + 0.1, advantages=draw.flip(0))
        for sample in text_samples()
        for draw in [-torch.rand(sample.token_ids.shape, generator=torch.Generator().manual_seed(5))]
    ]
    samples, _ = objective.prepare(samples)
    batch = collate(samples, padding_free=True)

    def slopes(stats):
        stats = stats.clone().requires_grad_()
        loss = objective(batch.loss_inputs(*stats.unbind(-1), count(samples))).loss
        return torch.autograd.grad(loss, stats)[0]

    generator = torch.Generator().manual_seed(6)
    stats = -torch.rand(len(batch.targets), 2, generator=generator)
    before, apart = slopes(stats), 0.0
    for token in range(len(stats)):
        others = torch.arange(len(stats)) != token
        after = slopes(stats.index_add(0, torch.tensor([token]), torch.full((1, 2), 0.05)))
        apart = max(apart, float((after - before)[others].abs().max()))
    assert objective.token_wise == (name not in SEES_SEQUENCES)
    assert (apart == 0.0) == objective.token_wise


def test_a_loss_of_ones_own_and_off_policy_masks_are_not_taken_for_token_wise():
    def own(inputs):
        return -inputs.logprobs, {}

    assert Objective().token_wise
    assert not Objective(as_loss(own)).token_wise
    assert not Objective(off_policy_threshold=0.1).token_wise


def test_old_logprobs_are_those_of_the_first_gradient_to_the_bit():
    for name in ("default", "gspo"):
        learner = learner_for(qwen2())
        metrics = learner.forward_backward(assign(learner.add_logprobs(text_samples()), GRPO()), OBJECTIVES[name])
        assert metrics["ppo_kl"] == 0.0


def test_squared_probs_are_added_if_needed_and_reach_the_estimator():
    model, samples = qwen2(), text_samples()
    learner = learner_for(model)
    assert all(sample.squared_probs is None for sample in learner.add_logprobs(samples, ["old_logprobs"]))
    for squared, plain in zip(
        learner.add_logprobs(samples, ["old_logprobs", "squared_probs"]),
        learner_for(Headless(model)).add_logprobs(samples, ["old_logprobs", "squared_probs"]),
        strict=True,
    ):
        with torch.no_grad():
            logits = model(input_ids=squared.token_ids[None], position_ids=squared.position_ids).logits[0]
        expected = torch.nn.functional.pad(logits[:-1].softmax(-1).square().sum(-1), (1, 0))
        expected = torch.where(squared.loss_mask, expected, 0.0)
        torch.testing.assert_close(squared.squared_probs, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(plain.squared_probs, expected, atol=1e-6, rtol=0)
    assigned = assign(learner.add_logprobs(samples, ["old_logprobs", "squared_probs"]), OptimalTokenBaseline())
    assert any(sample.advantages.any() for sample in assigned)
    with pytest.raises(ValueError, match="squared_probs"):
        assign(learner.add_logprobs(samples, ["old_logprobs"]), OptimalTokenBaseline())


def test_the_head_is_itself_again_after_an_error():
    model, samples = qwen2(), text_samples()
    batch = collate(samples, padding_free=True)
    with pytest.raises(IndexError):
        TokenModel(model)(replace(batch, predictors=batch.predictors + 1000))
    assert "forward" not in vars(model.lm_head)
    assert model(input_ids=samples[0].token_ids[None]).logits.shape[-1] == TEXT["vocab_size"]
    with pytest.raises(ValueError, match="temperature is 0"):
        TokenModel(model)(batch, 0.0)


def test_a_head_with_a_hook_on_its_weight_is_left_to_autograd():
    """A gradient added in place would pass the hook by."""
    model = qwen2()
    learner = learner_for(model, limit=MicroLimit(1))
    calls = []
    model.lm_head.weight.register_hook(calls.append)
    samples = text_samples()
    learner.forward_backward(assign(learner.add_logprobs(samples), GRPO()), Objective())
    assert len(calls) == len(samples)


def test_models_with_pictures_have_heads_too():
    learner = learner_for(qwen25_vl().double())
    assert learner.add_logprobs(picture_samples())[0].old_logprobs.any()
    assert learner._policy_tokens._head_is_last


class InPlace(nn.Module):
    """A model that scales the very tensor that its head gave."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_output_embeddings(self):
        return self.model.lm_head

    def forward(self, **inputs):
        output = self.model(**inputs)
        output.logits.mul_(3.0)
        return output


def test_logits_that_are_changed_in_place_are_noticed():
    samples = text_samples()
    model = InPlace(qwen2())
    for one, other in zip(
        *(learner_for(each).add_logprobs(samples, ["old_logprobs"]) for each in (model, Headless(model))), strict=True
    ):
        torch.testing.assert_close(one.old_logprobs, other.old_logprobs, atol=1e-6, rtol=0)
