"""Learner and embedded engine on a simulated GPU: no tensor mixes devices, and the host seldom waits.

Found without a GPU is what a GPU would refuse or slow down; see `shadow_device`.
"""

from collections.abc import Iterator
from dataclasses import replace

import families
import pytest
import torch
from family_prompts import make_prompts, make_samples
from shadow_device import DEVICE, Shadow, move, shadow_device

from r1_cli.models.attention import attend_packed
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.optim import build_optimizer
from r1_core.losses import POLICY_LOSSES, Correction, Rejection
from r1_core.objective import Objective
from r1_core.types import Sample
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

PICTURES = ("picture last", "pictures of several sizes")
NEEDS = ("old_logprobs", "squared_probs", "ref_logprobs")
KL = Objective(kl_penalty="low_var_kl", kl_coef=0.1, entropy_coef=0.1)
OBJECTIVES = {name: Objective(POLICY_LOSSES.get(name)()) for name in POLICY_LOSSES} | {
    "KL and entropy": KL,
    "full KL": Objective(kl_penalty="full", kl_coef=0.1),
    "correction": Objective(correction=Correction("token", rejections=(Rejection("k3", "mean", 0.5),))),
    "off-policy mask": Objective(off_policy_threshold=0.1),
}
# What transformers asks to build a mask, of a pack or of padding, and whether a loss is the one foreseen.
WAITS_A_PASS, WAITS_A_GRADIENT = {True: 1, False: 2}, 1
# Kernels and copies of a micro-batch of packed "qwen2" with its two layers, gradients included; a tenth of room (844).
LAUNCHES = 930
# Of pictures where they go, four times their sizes, their ends, those of their windows, and the longest of both: once a
# pass, and not a layer. Masks of further kinds of layers.
EXTRA = {"qwen2_5_vl": 9, "gemma3_text": 1, "qwen3_5_text": 1}


def build(family: str, layout: bool, device: torch.device | None) -> Learner:
    """A learner with a reference, two samples in a micro-batch; on the device if one is given."""
    models = [families.make_model(family) for _ in range(2)]
    for model in models:
        attend_packed(model)
        if device is not None:
            move(model)
    policy, reference = models
    optimizer = build_optimizer(policy.named_parameters(), lr=1e-3)
    batching = Batching(layout, MicroLimit(2), MicroLimit(2))
    return Learner(policy, optimizer, lambda step: 1.0, reference=reference, batching=batching, device=device)


def samples_of(family: str) -> list[Sample]:
    samples = make_samples(make_prompts(family, PICTURES if family in families.VISION_FAMILIES else ()))[:4]
    rollout = [-torch.rand(len(s.token_ids), generator=torch.Generator().manual_seed(3)) for s in samples]
    return [
        replace(sample, group_id=i // 2, reward=float(i % 2), rollout_logprobs=own)
        for i, (sample, own) in enumerate(zip(samples, rollout, strict=True))
    ]


def plain(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.inner if isinstance(tensor, Shadow) else tensor


def assert_same_gradients(one: Learner, other: Learner) -> None:
    for (name, ours), (_, theirs) in zip(one.model.named_parameters(), other.model.named_parameters(), strict=True):
        torch.testing.assert_close(plain(ours.grad), plain(theirs.grad), rtol=1e-5, atol=1e-6, msg=name)


CASES = [
    ("qwen2", True),
    ("qwen2", False),
    ("qwen2_5_vl", True),
    ("gemma3_text", True),
    ("qwen3_5_text", True),
]


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_a_step_is_the_processors_and_no_layer_waits(family: str, layout: bool) -> None:
    given, here = samples_of(family), build(family, layout, None)
    expected = assign(here.add_logprobs(given, NEEDS), GRPO())
    here.forward_backward(expected, KL)
    waits = WAITS_A_PASS[layout] + EXTRA.get(family, 0)
    with shadow_device() as mode:
        there = build(family, layout, DEVICE)
        found = there.add_logprobs(given, NEEDS)
        # Two micro-batches, through the policy and through the reference, whose results come back in one copy each.
        assert mode.waits.total() <= 2 * 2 * waits + 2, dict(mode.waits)
        for one, other in zip(found, expected, strict=True):
            for need in NEEDS:
                torch.testing.assert_close(getattr(one, need), getattr(other, need), rtol=1e-5, atol=1e-6)
        mode.waits.clear()
        mode.launches.clear()
        there.forward_backward(assign(found, GRPO()), KL)
        assert mode.waits.total() <= 2 * (waits + WAITS_A_GRADIENT) + 1, dict(mode.waits)
        if (family, layout) == ("qwen2", True):
            assert mode.launches.total() <= 2 * LAUNCHES, mode.launches.most_common(10)
        assert_same_gradients(there, here)
        mode.waits.clear()
        assert there.optimizer.defaults["fused"]
        assert there.optim_step()["grad_norm"] == pytest.approx(here.optim_step()["grad_norm"], rel=1e-5)
        assert mode.waits.total() <= 1, dict(mode.waits)
        for (name, own), (_, other) in zip(there.weights(), here.weights(), strict=True):
            # AdamW's first step is a sign: that of a gradient which is all rounding need not be the same.
            assert (plain(own) - plain(other)).abs().mean() < 1e-5, name


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Learner, Learner, list[Sample]]]:
    """A learner on the device, its twin on the processor, and samples ready for any objective."""
    here = build("qwen2", True, None)
    samples = assign(here.add_logprobs(samples_of("qwen2"), NEEDS), GRPO())
    with shadow_device():
        there = build("qwen2", True, DEVICE)
    return there, here, samples


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_runs_on_the_device(name: str, pair: tuple[Learner, Learner, list[Sample]]) -> None:
    there, here, samples = pair
    metrics = here.forward_backward(samples, OBJECTIVES[name])
    with shadow_device():
        assert there.forward_backward(samples, OBJECTIVES[name]) == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert_same_gradients(there, here)
        there.optimizer.zero_grad()
    here.optimizer.zero_grad()


def test_half_precision_runs_on_the_device() -> None:
    samples = samples_of("qwen2")
    with shadow_device():
        half = move(families.make_model("qwen2").to(torch.bfloat16))
        optimizer = build_optimizer(half.named_parameters(), lr=1e-3, strategy="adamw_bf16")
        learner = Learner(half, optimizer, lambda step: 1.0, device=DEVICE)
        learner.forward_backward(assign(learner.add_logprobs(samples), GRPO()), Objective())
        assert learner.optim_step()["skipped_steps"] == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_the_embedded_engine_samples_on_the_device_what_it_samples_on_the_processor(family: str) -> None:
    prompts, params = make_prompts(family, PICTURES)[:4], SamplingParams(max_tokens=6, n=2, temperature=0.7, top_p=0.9)

    def sample(device: torch.device | None) -> list[list[list[int]]]:
        model = families.make_model(family)
        engine = EmbeddedEngine(model if device is None else move(model), end_token_ids={258}, device=device or "cpu")
        weights = [(name, tensor.clone()) for name, tensor in families.make_model(family).state_dict().items()]
        with engine.active(LocalWeights(weights, 1)):
            groups = dict(engine.generate(prompts, params))
        return [[[*completion.token_ids] for completion in groups[index]] for index in range(len(prompts))]

    expected = sample(None)
    with shadow_device():
        assert sample(DEVICE) == expected
