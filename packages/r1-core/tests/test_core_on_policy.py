"""One forward pass gives the old log-probs and the gradient, where no optimizer step lies between the two."""

import pytest
import torch
from core_heads import Headless
from core_models import picture_samples, qwen2, qwen25_vl, text_samples

from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.losses import GSPO, ClipCov, Correction
from r1_core.objective import Objective

OBJECTIVES = {
    "token-wise": Objective(),
    "whole sequences": Objective(GSPO(), "seq"),
    "KL and entropy": Objective(kl_penalty="low_var_kl", kl_coef=0.1, entropy_coef=0.01),
    "full KL": Objective(kl_penalty="full", kl_coef=0.1),
    "off-policy mask": Objective(off_policy_threshold=0.1),
}


def learner_for(model, reference=None, *, padding_free=True):
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    batching = Batching(padding_free, MicroLimit(2), MicroLimit(2))
    return Learner(model, optimizer, lambda step: 1.0, reference=reference, batching=batching)


def gradients(learner):
    return {name: param.grad for name, param in learner.model.named_parameters()}


@pytest.mark.parametrize("padding_free", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize(
    ("build", "make"),
    [(qwen2, text_samples), (qwen25_vl, picture_samples), (lambda seed=0: Headless(qwen2(seed)), text_samples)],
    ids=["text", "pictures", "headless"],
)
def test_one_forward_pass_gives_what_two_would(build, make, objective, padding_free):
    two, one = (learner_for(build(), build(1), padding_free=padding_free) for _ in range(2))
    samples = assign(two.add_logprobs(make(), ["ref_logprobs"]), GRPO())
    annotated = two.add_logprobs(samples, ["full_kl"] if objective.full_kl else ["old_logprobs"])
    expected = two.forward_backward(annotated, objective)
    found, metrics = one.forward_backward_on_policy(samples, objective)
    assert metrics == expected
    for here, there in zip(found, annotated, strict=True):
        assert torch.equal(here.old_logprobs, there.old_logprobs)
        torch.testing.assert_close(here.entropies, there.entropies, atol=1e-6, rtol=0)
    wanted = gradients(two)
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(one).items())


def test_a_learner_that_was_just_made_computes_as_one_that_has_seen_its_model():
    """Otherwise a resumed run would not be, to the bit, the one that went on."""
    fresh, used = learner_for(qwen2()), learner_for(qwen2())
    samples = assign(text_samples(), GRPO())
    used.forward_backward_on_policy(samples, Objective())
    used.optimizer.zero_grad()
    for learner in (fresh, used):
        learner.forward_backward_on_policy(samples, Objective())
    wanted = gradients(used)
    assert all(torch.equal(grad, wanted[name]) for name, grad in gradients(fresh).items())


@pytest.mark.parametrize("objective", [Objective(correction=Correction()), Objective(ClipCov())])
def test_an_objective_that_looks_at_old_logprobs_first_is_refused(objective):
    assert "old_logprobs" in objective.needs
    samples = assign(text_samples(), GRPO())
    with pytest.raises(ValueError, match="no old_logprobs, which this objective needs in advance"):
        learner_for(qwen2()).forward_backward_on_policy(samples, objective)


def test_samples_without_advantages_are_refused():
    with pytest.raises(ValueError, match="a sample has no advantages"):
        learner_for(qwen2()).forward_backward_on_policy(text_samples(), Objective())


def test_an_update_computes_without_dropout_as_every_other_pass():
    """With it, on-policy importance ratios would differ from 1."""
    model = qwen2()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
    model.train()
    learner = learner_for(model)
    samples = learner.add_logprobs(assign(text_samples(), GRPO()), ["old_logprobs"])
    again, _ = learner.forward_backward_on_policy(samples, Objective())
    for before, after in zip(samples, again, strict=True):
        assert torch.equal(before.old_logprobs, after.old_logprobs)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_that_recompute_their_activations_are_told_that_they_train(checkpointed):
    model, calls = qwen2(), []
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    learner = learner_for(model)
    [one] = learner.add_logprobs(assign(text_samples(), GRPO())[:1], ["old_logprobs"])
    calls.clear()
    learner.forward_backward([one], Objective())
    assert len(calls) == (2 if checkpointed else 1)
