"""The gradient of an optimizer step does not depend on how the step was cut, nor on the number of ranks."""

from dataclasses import replace
from functools import cache, partial

import core_ranks
import pytest
import ranks
import torch
from core_cases import CUTS, CUTS_FOR_RANKS, OBJECTIVES, distinct, off_policy_samples, outcome, policy_learner
from core_models import in_float64, picture_samples, qwen2, qwen25_vl, reads_pack, text_samples, with_siblings

from r1_core.advantages import ESTIMATORS, GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer, learning_rate_scale
from r1_core.losses import AGGREGATIONS, Correction, ValueLoss, aggregate
from r1_core.objective import Objective
from r1_core.types import Totals

MODELS = {
    "qwen2": (lambda seed: reads_pack(qwen2(seed)), lambda: with_siblings(text_samples())),
    "qwen2.5-vl": (lambda seed: reads_pack(qwen25_vl(seed)), lambda: with_siblings(picture_samples())),
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


def step(build, samples, batching, monkeypatch):
    """One step off policy: add_logprobs with this model, move it, then take the gradient."""
    learner = learner_for(build, batching, monkeypatch)
    samples = assign(learner.add_logprobs(samples), GRPO())
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for param in learner.model.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=generator).double())
    objective = Objective(aggregation="seq", kl_penalty="low_var_kl", kl_coef=0.1)
    metrics = learner.forward_backward(samples, objective)
    grads = {name: param.grad for name, param in learner.model.named_parameters() if param.grad is not None}
    return samples, metrics, grads


@pytest.fixture(scope="module")
def expected():
    """One sample a forward, packed: nothing shares a forward with anything."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield {name: step(build, make(), Batching(True), monkeypatch) for name, (build, make) in MODELS.items()}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_the_same_for_every_cut(name, cut, expected, monkeypatch):
    build, make = MODELS[name]
    samples, metrics, grads = step(build, make(), CUTS[cut], monkeypatch)
    expected_samples, expected_metrics, expected_grads = expected[name]
    for sample, other in zip(samples, expected_samples, strict=True):
        torch.testing.assert_close(sample.old_logprobs, other.old_logprobs, atol=1e-6, rtol=0)
        torch.testing.assert_close(sample.ref_logprobs, other.ref_logprobs, atol=1e-6, rtol=0)
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-2
    assert_same((metrics, grads), (expected_metrics, expected_grads), cut)


def test_pictures_reach_the_gradient(expected):
    _, _, grads = expected["qwen2.5-vl"]
    assert float(grads["model.visual.patch_embed.proj.weight"].abs().max()) > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_the_same_step_twice_gives_the_same_bits(name, monkeypatch):
    build, make = MODELS[name]
    batching = Batching(True, MicroLimit(tokens=30), MicroLimit(2))
    first, second = (step(build, make(), batching, monkeypatch) for _ in range(2))
    assert first[1] == second[1]
    assert all(torch.equal(grad, second[2][key]) for key, grad in first[2].items())


# --- every objective --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield policy_learner(monkeypatch)


@pytest.fixture(scope="module")
def one_by_one(learner):
    """Metrics and gradients of an objective in one process with one sample a forward."""
    return cache(lambda name: outcome(learner, OBJECTIVES[name], CUTS["packed, 1 sample"]))


@pytest.fixture(scope="module")
def of_two_ranks():
    """Metrics and gradients of two ranks, by cut and objective."""
    first, second = ranks.run(core_ranks.every_gradient)
    assert {key: metrics for key, (metrics, _) in first.items()} == {key: own for key, (own, _) in second.items()}
    return first


def assert_same(actual, expected, cut):
    (metrics, grads), (expected_metrics, expected_grads) = actual, expected
    assert grads.keys() == expected_grads.keys()
    for key, grad in grads.items():
        named = partial("{}: {}: {}".format, cut, key)
        torch.testing.assert_close(grad, expected_grads[key], atol=1e-10, rtol=0, msg=named)
    assert metrics == pytest.approx(expected_metrics, abs=1e-10), cut


@pytest.mark.parametrize(
    "share", [pytest.param(1, marks=pytest.mark.slow), len(distinct(AGGREGATIONS))], ids=["every cut", "a share"]
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_sees_the_cut(name, share, learner, one_by_one):
    """Of every cut, or of a share of them, of which each loss and each aggregation sees all."""
    assert max(float(grad.abs().max()) for grad in one_by_one(name)[1].values()) > 1e-3
    place = [*OBJECTIVES].index(name)
    first = place + place // len(distinct(AGGREGATIONS))
    for number, (cut, batching) in enumerate(CUTS.items(), start=first):
        if number % share == 0:
            assert_same(outcome(learner, OBJECTIVES[name], batching), one_by_one(name), cut)


@pytest.mark.parametrize("name", distinct(ESTIMATORS))
def test_no_estimators_gradient_sees_that_prompts_are_shared(name, learner):
    samples = [
        replace(s, values=s.ref_logprobs, squared_probs=s.old_logprobs.exp(), reward=float(i % 2), group_id=i % 3)
        for i, s in enumerate(off_policy_samples())
    ]
    parts = [{"right": sample.reward, "form": i % 2} for i, sample in enumerate(samples)]
    given = {"baselines": [0.25] * len(samples), "parts": parts, "correction": Correction("token")}
    samples = assign(samples, ESTIMATORS.get(name)(), **given)
    expected = outcome(learner, Objective(), CUTS["packed, 1 sample"], samples)
    assert max(float(grad.abs().max()) for grad in expected[1].values()) > 1e-3
    assert_same(outcome(learner, Objective(), CUTS["sharing prompts, 3 samples"], samples), expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_sees_the_number_of_ranks(name, one_by_one, of_two_ranks):
    for cut in CUTS_FOR_RANKS:
        assert_same(of_two_ranks[cut, name], one_by_one(name), f"two ranks, {cut}")


@pytest.mark.parametrize("clip", [0.2, None])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_value_loss_does_not_see_the_cut(aggregation, clip):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([4, 1, 6, 0, 3, 9])
    features = torch.randn(6, 9, 5, generator=generator).double()
    old_values, returns = torch.randn(2, 6, 9, generator=generator).double()
    mask = torch.arange(9) < lengths[:, None]
    mask[2, 1] = False
    totals = Totals(int(mask.sum()), int(mask.any(-1).sum()), length=9)
    grads = []
    for size in (1, 2, 6):
        head = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
        for rows in torch.arange(6).split(size):
            width = max(int(lengths[rows].max()), 1)
            own = [x[rows, :width] for x in (features, old_values, returns, mask)]
            losses, _ = ValueLoss(clip)(own[0] @ head, *own[1:])
            aggregate(losses, own[3], aggregation, totals).backward()
        grads.append(head.grad)
    assert float(grads[0].abs().max()) > 1e-3
    torch.testing.assert_close(grads[1:], [grads[0]] * 2, atol=1e-10, rtol=0)
