"""The KL over the whole vocabulary, in the loss or the reward, is that of all logits of both models."""

from dataclasses import replace

import pytest
import torch
from core_heads import CHANGING, Headless, LoRAHead, learner_for
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, text_samples

from r1_core.advantages import Reinforce, assign
from r1_core.learner import linear_head
from r1_core.objective import Objective

TEMPERATURE = 0.7
KL_ONLY = Objective(kl_penalty="full", kl_coef=0.3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three tokens at a time, with the logits of both models."""
    monkeypatch.setattr(linear_head, "CHUNK_BYTES", 64 * 4 * 2 * 3)


def frozen():
    model = qwen2()
    model.lm_head.requires_grad_(False)
    return model


def adapted():
    model = qwen2()
    torch.manual_seed(7)
    model.lm_head = LoRAHead(model.lm_head)
    return model


HEADS = {
    "trained": qwen2,
    "tied": lambda: qwen2(tied=True),
    "frozen": frozen,
    "lora": adapted,
    "unnamed": lambda: Headless(qwen2()),
    "not last": lambda: CHANGING["granite"](),
}
REFERENCES = {"its head alone": lambda: qwen2(1), "all logits": lambda: Headless(qwen2(1))}


def plain_kl(model, reference, sample):
    """The KL of every token of a sample [L], by its definition, from the logits of all tokens."""
    policy, other = (
        (each(input_ids=sample.token_ids[None]).logits[0, :-1] / TEMPERATURE).softmax(-1) for each in (model, reference)
    )
    return torch.nn.functional.pad((policy * (policy / other).log()).sum(-1), (1, 0))


def without_advantages(samples):
    return [replace(sample, advantages=torch.zeros(sample.token_ids.shape)) for sample in samples]


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("head_of_reference", REFERENCES)
@pytest.mark.parametrize("head", HEADS)
def test_the_loss_and_its_gradient_are_those_of_the_definition(head, head_of_reference, padding_free, monkeypatch):
    model = in_float64(HEADS[head](), monkeypatch)
    reference = in_float64(REFERENCES[head_of_reference](), monkeypatch)
    learner = learner_for(model, padding_free=padding_free, reference=reference, temperature=TEMPERATURE)
    samples = without_advantages(learner.add_logprobs(text_samples()))
    metrics = learner.forward_backward(samples, KL_ONLY)
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert all(param.grad is None for param in reference.parameters())

    model.zero_grad()
    values = torch.cat([plain_kl(model, reference, sample)[sample.loss_mask] for sample in samples])
    mean = values.mean()
    (KL_ONLY.kl_coef * mean).backward()
    assert metrics["kl_loss"] == pytest.approx(mean.item(), abs=1e-10)
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert found.keys() == expected.keys()
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-4
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-10, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_samples_get_it_if_it_is_needed(head, padding_free):
    model, reference = HEADS[head](), qwen2(1)
    learner = learner_for(model, padding_free=padding_free, reference=reference, temperature=TEMPERATURE)
    plain = learner.add_logprobs(text_samples(), ["old_logprobs"])
    annotated = learner.add_logprobs(text_samples(), ["old_logprobs", "squared_probs", "full_kl"])
    for sample, bare in zip(annotated, plain, strict=True):
        assert bare.full_kl is None
        with torch.no_grad():
            expected = torch.where(sample.loss_mask, plain_kl(model, reference, sample), 0.0)
        torch.testing.assert_close(sample.full_kl, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(sample.old_logprobs, bare.old_logprobs, atol=1e-6, rtol=0)
        assert ((sample.squared_probs > 0) == sample.loss_mask).all()


def test_the_reward_loses_it_token_by_token():
    learner = learner_for(qwen2(), reference=qwen2(1))
    samples = learner.add_logprobs(text_samples(), ["old_logprobs", "full_kl"])
    plain = assign(samples, Reinforce(whiten=False))
    for sample, other in zip(
        assign(samples, Reinforce(whiten=False), kl_penalty="full", kl_coef=0.5), plain, strict=True
    ):
        to_go = sample.full_kl.flip(0).cumsum(0).flip(0)
        expected = torch.where(sample.loss_mask, other.advantages - 0.5 * to_go, 0.0)
        torch.testing.assert_close(sample.advantages, expected)


def test_a_policy_that_is_its_reference_has_none_and_is_not_pulled():
    learner = learner_for(qwen2(), reference=qwen2())
    samples = without_advantages(learner.add_logprobs(text_samples(), ["old_logprobs", "full_kl"]))
    assert all((sample.full_kl == 0).all() for sample in samples)
    assert learner.forward_backward(samples, KL_ONLY)["kl_loss"] == 0
    assert max(float(param.grad.abs().max()) for param in learner.model.parameters()) < 1e-7


def test_models_with_pictures_have_it_too():
    models = qwen25_vl().double(), qwen25_vl(1).double()
    learner = learner_for(models[0], reference=models[1])
    samples = without_advantages(learner.add_logprobs(picture_samples(), ["old_logprobs", "full_kl"]))
    trained = torch.cat([sample.full_kl[sample.loss_mask] for sample in samples])
    assert learner.forward_backward(samples, KL_ONLY)["kl_loss"] == pytest.approx(float(trained.mean()), abs=1e-6)


def test_without_a_reference_its_absence_is_named():
    learner = learner_for(qwen2())
    samples = learner.add_logprobs(text_samples(), ["old_logprobs", "full_kl"])
    with pytest.raises(ValueError, match=r"sample 0 \(group 0\) lacks full_kl.*of a learner that has a reference"):
        assign(samples, Reinforce(), kl_penalty="full", kl_coef=0.1)
    with pytest.raises(ValueError, match="give the learner a reference"):
        learner.forward_backward(without_advantages(samples), KL_ONLY)
