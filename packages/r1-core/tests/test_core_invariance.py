"""The gradient of an optimizer step does not depend on how the step was cut."""

from functools import partial

import pytest
import torch
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, text_samples

from r1_core.advantages import GRPO, assign
from r1_core.batching import Batching, MicroLimit
from r1_core.learner import Learner
from r1_core.objective import Objective
from r1_core.optim import build_optimizer, learning_rate_scale

MODELS = {"qwen2": (qwen2, text_samples), "qwen2.5-vl": (qwen25_vl, picture_samples)}
CUTS = {
    f"{'packed' if packed else 'padded'}-{limit.tokens or limit.samples}": Batching(packed, limit, limit)
    for packed in (True, False)
    for limit in (MicroLimit(1), MicroLimit(2), MicroLimit(3), MicroLimit(99), MicroLimit(tokens=30))
}


def learner_for(build, batching, monkeypatch):
    model = in_float64(build(0), monkeypatch)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-3)
    return Learner(
        model,
        optimizer,
        partial(learning_rate_scale, total_steps=1),
        reference=in_float64(build(1), monkeypatch),
        batching=batching,
        temperature=0.7,
    )


def step(build, samples, batching, aggregation, monkeypatch):
    """One step off policy: annotate with this model, move it, then take the gradient."""
    learner = learner_for(build, batching, monkeypatch)
    samples = assign(learner.annotate(samples), GRPO())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for param in learner.model.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=generator).double())
    objective = Objective(aggregation=aggregation, kl_penalty="low_var_kl", kl_coef=0.1)
    metrics = learner.forward_backward(samples, objective)
    grads = {name: param.grad for name, param in learner.model.named_parameters() if param.grad is not None}
    return samples, metrics, grads


@pytest.fixture(scope="module")
def expected():
    """One sample a forward, packed: nothing shares a forward with anything."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield {
            (name, aggregation): step(build, make(), Batching(True), aggregation, monkeypatch)
            for name, (build, make) in MODELS.items()
            for aggregation in ("token", "seq")
        }


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("aggregation", ["token", "seq"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_the_same_for_every_cut(name, aggregation, cut, expected, monkeypatch):
    build, make = MODELS[name]
    samples, metrics, grads = step(build, make(), CUTS[cut], aggregation, monkeypatch)
    expected_samples, expected_metrics, expected_grads = expected[name, aggregation]
    for sample, other in zip(samples, expected_samples, strict=True):
        torch.testing.assert_close(sample.old_logprobs, other.old_logprobs, atol=1e-6, rtol=0)
        torch.testing.assert_close(sample.ref_logprobs, other.ref_logprobs, atol=1e-6, rtol=0)
    assert grads.keys() == expected_grads.keys()
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-2
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[key], atol=1e-10, rtol=0, msg=lambda m, key=key: f"{key}: {m}")
    assert metrics == pytest.approx(expected_metrics, abs=1e-10)


def test_pictures_reach_the_gradient(expected):
    _, _, grads = expected["qwen2.5-vl", "token"]
    assert float(grads["model.visual.patch_embed.proj.weight"].abs().max()) > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_the_same_step_twice_gives_the_same_bits(name, monkeypatch):
    build, make = MODELS[name]
    batching = Batching(True, MicroLimit(tokens=30), MicroLimit(2))
    first, second = (step(build, make(), batching, "token", monkeypatch) for _ in range(2))
    assert first[1] == second[1]
    assert all(torch.equal(grad, second[2][key]) for key, grad in first[2].items())
