"""The loss of fine-tuning: Hugging Face's own loss, whatever the layout, and its weights."""

from dataclasses import replace

import pytest
import torch
from core_models import VOCAB, in_float64, qwen2, reads_pack, text_samples, with_siblings

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.losses import NLL
from r1_core.objective import Objective
from r1_core.types import LossInputs, Totals

LAYOUTS = {
    "packed": Batching(True, MicroLimit(100), MicroLimit(100)),
    "packed, cut": Batching(True, MicroLimit(3), MicroLimit(3)),
    "padded": Batching(False, MicroLimit(100), MicroLimit(100)),
    "padded, cut": Batching(False, MicroLimit(3), MicroLimit(3)),
    "prompts shared": Batching(True, MicroLimit(100), MicroLimit(100), share_prompts=True),
}


def rows_to_learn(weight=1.0):
    """Rows of two groups, of which some share prompts, one has a hole in its mask, and one no trained token."""
    return [
        replace(sample, advantages=torch.full(sample.token_ids.shape, weight))
        for sample in with_siblings(text_samples())
    ]


def learner_for(model, batching):
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    return Learner(model, optimizer, lambda step: 1.0, batching=batching)


def labelled(samples):
    """The samples as Hugging Face reads them, padded on the right."""
    length = max(len(sample.token_ids) for sample in samples)
    input_ids, labels = torch.zeros(len(samples), length).long(), torch.full((len(samples), length), -100)
    attention = torch.zeros(len(samples), length).long()
    for i, sample in enumerate(samples):
        own = len(sample.token_ids)
        input_ids[i, :own], attention[i, :own] = sample.token_ids, 1
        labels[i, :own] = torch.where(sample.loss_mask, sample.token_ids, -100)
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention}


@pytest.mark.parametrize("batching", LAYOUTS.values(), ids=LAYOUTS)
def test_the_loss_and_its_gradient_are_those_of_hugging_face(batching, monkeypatch):
    samples = rows_to_learn()
    plain = in_float64(qwen2(), monkeypatch)
    loss = plain(**labelled(samples)).loss
    loss.backward()
    learner = learner_for(in_float64(reads_pack(qwen2()), monkeypatch), batching)
    found, metrics = learner.forward_backward_on_policy(samples, Objective(NLL()))
    # Hugging Face computes its loss in float32 whatever the model's dtype.
    assert metrics["pg_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["nll"] == metrics["pg_loss"]
    assert 0 < metrics["entropy_loss"] <= torch.tensor(float(VOCAB)).log()
    for here, there in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(here.grad, there.grad, atol=1e-6, rtol=0)
    kept = torch.cat([sample.old_logprobs[sample.loss_mask] for sample in found])
    assert -kept.mean().item() == pytest.approx(metrics["nll"], abs=1e-6)


def gradients(batching, samples, objective, monkeypatch):
    learner = learner_for(in_float64(reads_pack(qwen2()), monkeypatch), batching)
    _, metrics = learner.forward_backward_on_policy(samples, objective)
    return metrics, torch.cat([param.grad.flatten() for param in learner.model.parameters()])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["nll", "dft"])
def test_every_layout_gives_the_same_gradient(dynamic, aggregation, monkeypatch):
    samples, objective = rows_to_learn(), Objective(NLL(dynamic), aggregation)
    expected_metrics, expected = gradients(LAYOUTS["padded"], samples, objective, monkeypatch)
    assert expected.abs().max() > 1e-3
    for name, batching in LAYOUTS.items():
        metrics, found = gradients(batching, samples, objective, monkeypatch)
        assert metrics == pytest.approx(expected_metrics, abs=1e-10), name
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_a_row_of_weight_two_counts_as_two_rows_do_in_the_sum(monkeypatch):
    once = rows_to_learn()
    heavy = [replace(once[0], advantages=2 * once[0].advantages), *once[1:]]
    totals = [sum(sample.response_length for sample in rows) for rows in (once, [once[0], *once])]
    _, weighted = gradients(LAYOUTS["packed"], heavy, Objective(NLL()), monkeypatch)
    _, repeated = gradients(LAYOUTS["packed"], [once[0], *once], Objective(NLL()), monkeypatch)
    torch.testing.assert_close(weighted * totals[0], repeated * totals[1], atol=1e-9, rtol=0)


def test_dft_weighs_a_token_by_its_probability_without_a_gradient():
    logprobs = torch.tensor([[-0.5, -3.0, -torch.inf]]).double().requires_grad_()
    mask, weights = torch.tensor([[True, True, False]]), torch.tensor([[1.0, 0.5, torch.nan]]).double()
    inputs = LossInputs(logprobs, mask, weights, logprobs.detach(), Totals(2, 1))
    assert Objective(NLL(dynamic=True)).token_wise, "the head would compute its logits twice"
    losses, metrics = NLL(dynamic=True)(inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    expected = torch.tensor([[-1.0, -0.5, 0.0]]).double() * logprobs.detach().exp()
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(losses.detach(), expected * torch.tensor([[-0.5, -3.0, 0.0]]).double())
    assert metrics["nll"].tolist() == [[0.5, 3.0, 0.0]]
