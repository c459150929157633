"""The learner's methods: what they return, what they refuse, and what survives saving and loading."""

import json
import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from core_critics import make_critic
from core_models import picture_samples, qwen2, qwen25_vl, text_samples
from safetensors.torch import load_file

from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.logprobs import token_logprobs
from r1_core.learner.optim import build_optimizer, learning_rate_scale
from r1_core.learner.parallel import Parallel, Shard, find_blocks, shard_model
from r1_core.losses import POLICY_LOSSES, Correction, Rejection
from r1_core.objective import Objective
from r1_core.own import as_estimator
from r1_core.types import LossOutput


def learner_for(model, *, padding_free=True, **more):
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    learning_rate = partial(learning_rate_scale, total_steps=10, warmup_steps=2, kind="linear")
    batching = Batching(padding_free, MicroLimit(2), MicroLimit(2))
    return Learner(model, optimizer, learning_rate, batching=batching, **more)


def step(learner, samples):
    samples = assign(learner.add_logprobs(samples), GRPO())
    return {**learner.forward_backward(samples, Objective()), **learner.optim_step()}


def snapshot(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize(("build", "make"), [(qwen2, text_samples), (qwen25_vl, picture_samples)])
def test_added_logprobs_are_those_of_each_sample_alone(build, make, padding_free):
    model, samples = build(), make()
    samples = [
        type(s)(s.token_ids, s.loss_mask, s.position_ids, s.group_id, s.reward,
                {k: v.float() if v.is_floating_point() else v for k, v in s.model_inputs.items()})
        for s in samples
    ]  # fmt: skip
    annotated = learner_for(model, padding_free=padding_free, reference=build(1), temperature=0.5).add_logprobs(samples)
    for sample, one in zip(samples, annotated, strict=True):
        with torch.no_grad():
            positions = sample.position_ids[-3:, None] if len(sample.position_ids) > 1 else sample.position_ids
            logits = model(input_ids=sample.token_ids[None], position_ids=positions, **sample.model_inputs).logits[0]
        expected = (logits[:-1] / 0.5).log_softmax(-1).gather(-1, sample.token_ids[1:, None])[:, 0]
        expected = torch.where(sample.loss_mask, torch.nn.functional.pad(expected, (1, 0)), 0.0)
        torch.testing.assert_close(one.old_logprobs, expected, atol=1e-5, rtol=0)
        assert one.old_logprobs.dtype == torch.float32
        entropies = torch.distributions.Categorical(logits=logits[:-1] / 0.5).entropy()
        entropies = torch.where(sample.loss_mask, torch.nn.functional.pad(entropies, (1, 0)), 0.0)
        torch.testing.assert_close(one.entropies, entropies, atol=1e-5, rtol=0)
        if sample.loss_mask.any():
            assert not torch.allclose(one.ref_logprobs, one.old_logprobs, atol=1e-3)


def test_without_a_reference_there_are_no_reference_logprobs():
    assert all(sample.ref_logprobs is None for sample in learner_for(qwen2()).add_logprobs(text_samples()))


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_first_update_is_on_policy(temperature):
    learner = learner_for(qwen2(), temperature=temperature)
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    metrics = learner.forward_backward(samples, Objective())
    assert metrics["ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["pg_clipfrac_higher"] == 0
    tokens = torch.cat([sample.entropies[sample.loss_mask] for sample in samples])
    assert metrics["entropy_loss"] == pytest.approx(float(tokens.mean()), abs=1e-5)
    if temperature == 1.0:  # a random model is nearly uniform over its 64 tokens
        assert metrics["entropy_loss"] == pytest.approx(4.1, abs=0.1)


def test_steps_raise_the_probability_of_better_answers():
    learner = learner_for(qwen2())
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    before = learner.forward_backward(samples, Objective())["pg_loss"]
    learner.optim_step()
    assert learner.forward_backward(samples, Objective())["pg_loss"] < before


@pytest.mark.parametrize("verb", ["advantages", "old_logprobs"])
def test_samples_that_are_not_ready_are_refused(verb):
    learner = learner_for(qwen2())
    samples = learner.add_logprobs(text_samples()) if verb == "advantages" else assign(text_samples(), GRPO())
    with pytest.raises(ValueError, match=f"has no {verb}"):
        learner.forward_backward(samples, Objective())


def test_a_step_without_a_gradient_is_refused():
    with pytest.raises(RuntimeError, match="no gradient"):
        learner_for(qwen2()).optim_step()


def test_the_gradient_norm_is_clipped():
    learner = learner_for(qwen2(), max_grad_norm=0.125)
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=1.0)
    learner.learning_rate = lambda step: 100.0
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    before = snapshot(learner)
    learner.forward_backward(samples, Objective())
    assert learner.optim_step()["grad_norm"] > 0.125
    moved = torch.stack([(tensor - before[name]).square().sum() for name, tensor in learner.weights()]).sum().sqrt()
    assert moved.item() == pytest.approx(0.125, rel=1e-3)


def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so_once(caplog):
    learner = learner_for(qwen2())
    samples = assign(learner.add_logprobs(text_samples()), GRPO())

    class Broken(Objective):
        token_wise = False

        def __call__(self, inputs):
            return LossOutput(inputs.logprobs.sum() * float("nan"))

    before = snapshot(learner)
    with caplog.at_level(logging.WARNING):
        for skipped in (1, 2):
            learner.forward_backward(samples, Broken())
            assert learner.optim_step()["skipped_steps"] == skipped
    assert len(caplog.records) == 1
    assert "step 0 of the policy skipped" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert step(learner, text_samples())["skipped_steps"] == 2
    assert any(not torch.equal(tensor, before[name]) for name, tensor in learner.weights())


def divide_by_the_spread(inputs):
    """GRPO as one writes it first: 0/0 where all answers of a group are equal."""
    advantages = torch.zeros_like(inputs.rewards)
    for group in inputs.group_ids.unique():
        own = inputs.group_ids == group
        advantages[own] = (inputs.rewards[own] - inputs.rewards[own].mean()) / inputs.rewards[own].std()
    return inputs.spread(advantages)


@pytest.mark.parametrize("verb", ["forward_backward", "forward_backward_on_policy"])
def test_an_own_estimator_that_divides_by_zero_costs_the_step_and_not_the_run(verb, caplog, tmp_path):
    learner, twin = learner_for(qwen2()), learner_for(qwen2())
    estimator = as_estimator(divide_by_the_spread, "mine.py:estimator")
    equal = [replace(sample, reward=1.0) for sample in text_samples()]
    before = snapshot(learner)
    getattr(learner, verb)(assign(learner.add_logprobs(equal), estimator), Objective())
    assert "mine.py:estimator gives 4 of 5 samples advantages that are not finite, first sample 0" in caplog.text
    assert math.isnan(learner.optim_step()["grad_norm"])
    assert learner.skipped_steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    learner.save(tmp_path)
    twin.load(tmp_path)
    assert step(learner, text_samples()) == step(twin, text_samples())
    after = snapshot(learner)
    assert all(torch.equal(tensor, after[name]) for name, tensor in twin.weights())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_the_state_dict_with_tied_ones_once_and_frozen_ones_kept(tied):
    model = qwen2(tied=tied)
    model.model.layers[0].requires_grad_(False)
    learner = learner_for(model)
    frozen = model.model.layers[0].mlp.up_proj.weight.clone()
    step(learner, text_samples())
    weights = dict(learner.weights())
    expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert set(weights) == expected
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], frozen)
    assert len(learner.optimizer.state) == len([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("tied", [False, True])
def test_loading_then_stepping_gives_the_bits_of_not_having_stopped(tied, tmp_path):
    learner = learner_for(qwen2(tied=tied))
    step(learner, text_samples(seed=1))
    learner.save(tmp_path)
    metrics = step(learner, text_samples(seed=2))
    resumed = learner_for(qwen2(seed=9, tied=tied))
    resumed.load(tmp_path)
    assert step(resumed, text_samples(seed=2)) == metrics
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in learner.weights())
    assert resumed.step == learner.step == 2


def test_a_checkpoint_holds_safetensors_and_json_only(tmp_path):
    learner = learner_for(qwen2())
    step(learner, text_samples())
    learner.save(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "model.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
        "learner.json",
    }
    assert "exp_avg.model.embed_tokens.weight" in load_file(tmp_path / "optimizer.safetensors")
    assert json.loads((tmp_path / "learner.json").read_text())["step"] == 1


def test_a_model_only_checkpoint_gives_the_weights_and_a_fresh_optimizer(tmp_path):
    learner = learner_for(qwen2())
    step(learner, text_samples())
    learner.save(tmp_path, model_only=True)
    other = learner_for(qwen2(seed=9))
    with pytest.raises(ValueError, match="no optimizer state"):
        other.load(tmp_path)
    other.load(tmp_path, model_only=True)
    assert other.step == 0
    assert all(torch.equal(tensor, dict(other.weights())[name]) for name, tensor in learner.weights())


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32_parameters():
    exact, rough = learner_for(qwen2()), qwen2()
    parallel = Parallel.single_process("cpu")
    try:
        shard_model(rough, find_blocks(rough), parallel.mesh, Shard(torch.bfloat16, torch.float32))
        rough = learner_for(rough, parallel=parallel)
        first, second = (learner.add_logprobs(text_samples())[0].old_logprobs for learner in (exact, rough))
        assert not torch.equal(first, second)
        torch.testing.assert_close(first, second, atol=0.05, rtol=0)
        step(rough, text_samples())
        assert {tensor.dtype for _, tensor in rough.weights()} == {torch.float32}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_token_logprobs_and_entropy_are_those_of_the_tempered_softmax(dtype):
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 3] = -torch.inf
    targets = torch.tensor([0, 1, 2, 3, 10])
    logprobs, entropy = token_logprobs(logits, targets, 0.5, with_entropy=True)
    full = (logits.double() / 0.5).log_softmax(-1)
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(logprobs.double(), full[range(5), targets], atol=1e-5, rtol=0)
    expected = torch.distributions.Categorical(logits=logits.double() / 0.5).entropy()
    torch.testing.assert_close(entropy.double(), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(logits, targets, 0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1]),
    ],
)
def test_learning_rate_rises_then_follows_its_kind(kind, expected):
    scales = [
        learning_rate_scale(s, total_steps=10, warmup_steps=2, min_lr_ratio=0.1, kind=kind) for s in (0, 1, 2, 6, 10)
    ]
    assert scales == pytest.approx(expected)
    assert learning_rate_scale(99, total_steps=10, min_lr_ratio=0.1, kind=kind) == pytest.approx(expected[-1])


def test_cosine_and_linear_differ_on_the_way():
    cosine, linear = (learning_rate_scale(1, total_steps=4, kind=kind) for kind in ("cosine", "linear"))
    assert (cosine, linear) == (pytest.approx(0.853553), 0.75)


def test_a_cosine_may_go_through_more_than_half_a_wave():
    scales = [learning_rate_scale(s, total_steps=4, min_lr_ratio=0.2, kind="cosine", num_cycles=1.0) for s in range(5)]
    assert scales == pytest.approx([1.0, 0.6, 0.2, 0.6, 1.0])


def test_the_learning_rate_is_applied_and_reported():
    learner = learner_for(qwen2())
    assert [step(learner, text_samples())["lr"] for _ in range(3)] == pytest.approx([0.005, 0.01, 0.01])


def test_wrong_optimizer_settings_are_refused():
    model = qwen2()
    with pytest.raises(ValueError, match="'sgd'"):
        build_optimizer(model.named_parameters(), lr=1, strategy="sgd")
    with pytest.raises(ValueError, match="'cosin'"):
        learning_rate_scale(0, total_steps=1, kind="cosin")
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="everything is frozen"):
        build_optimizer(model.named_parameters(), lr=1)


REJECTIONS = (Rejection("k1", "sum", 2.0),)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "said", "objective"),
    [
        *(
            ("old_logprobs", "old_logprobs", Objective(POLICY_LOSSES.get(name)()))
            for name in ("default", "gspo", "gpg")
        ),
        ("ref_logprobs", "ref_logprobs", Objective(kl_penalty="low_var_kl", kl_coef=0.1)),
        ("rollout_logprobs", "weights", Objective(correction=Correction())),
        ("rollout_logprobs", "weights", Objective(correction=Correction(None, rejections=REJECTIONS))),
    ],
)
def test_log_probs_that_are_not_finite_are_said_by_sample_and_skip_the_step(field, said, objective, bad, caplog):
    learner = learner_for(qwen2(), reference=qwen2(1))
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    samples = [replace(s, rollout_logprobs=s.old_logprobs) for s in samples]
    samples[1] = replace(samples[1], **{field: torch.where(samples[1].loss_mask, bad, 0.0)})
    before = snapshot(learner)
    learner.forward_backward(samples, objective)
    metrics = learner.optim_step()
    assert not math.isfinite(metrics["grad_norm"])
    assert metrics["skipped_steps"] == 1
    found = f"1 of {len(samples)} samples have {said} that are not finite, first sample 1 (group {samples[1].group_id})"
    assert f"{found}: the step will be skipped" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())


def test_log_probs_that_nobody_reads_may_be_anything():
    learner = learner_for(qwen2(), reference=qwen2(1))
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    for name in ("ref_logprobs", "rollout_logprobs"):
        samples[1] = replace(samples[1], **{name: torch.full(samples[1].token_ids.shape, math.nan)})
    learner.forward_backward(samples, Objective())
    assert learner.optim_step()["skipped_steps"] == 0


def test_the_first_gradient_after_a_load_is_to_the_bit_the_one_that_would_have_come(tmp_path):
    learner, twin = learner_for(qwen2()), learner_for(qwen2(1))
    samples = assign(learner.add_logprobs(text_samples()), GRPO())
    learner.save(tmp_path)
    twin.load(tmp_path)
    metrics = [one.forward_backward(samples, Objective()) for one in (learner, twin)]
    assert metrics[0] == metrics[1]
    for own, other in zip(learner.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("make", [lambda: learner_for(qwen2()), lambda: make_critic(qwen2())])
def test_an_old_name_of_a_method_still_works_and_names_the_new_one(make):
    trained = make()
    for old, new in trained.old_names.items():
        with pytest.warns(DeprecationWarning, match=f"{type(trained).__name__}.{old} is now called {new};"):
            assert getattr(trained, old) == getattr(trained, new)
    with pytest.raises(AttributeError, match="object has no attribute 'never'"):
        trained.never  # noqa: B018
